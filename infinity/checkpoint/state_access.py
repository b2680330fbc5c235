"""Weights and optimizer state from outside the training loop: read, modified, exported.

Knows units, records and weights at rest; must not be used while updates are pending (the engine flushes first).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.record_stream import RecordStream, SharedStream
from infinity.errors import ModelError
from infinity.numerics.chunk_format import RECORD_GRANULE, WEIGHT, ChunkBuffer, ChunkFormat, MainWeight
from infinity.numerics.raw_bytes import checksum
from infinity.numerics.remainder import split_bits
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.tiers.state_store import StateStore
from infinity.tiers.weight_exchange import WeightExchange
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk, Piece, Slot, round_up
from infinity.units.parameter import let_go
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from infinity.updates.stream import Saver
from swapper.sync.interrupts import uninterrupted

logger = logging.getLogger(__name__)
_PART_NUMEL = 1 << 20


@dataclass
class Gathered:
    """A unit that is held open for the user, and what is needed to see what he changed."""

    unit: Unit
    checksums: dict[int, int] | None
    """Of each slot's weights before, where contents are compared; None: what torch has counted was changed."""
    kept: torch.Tensor | None
    """A copy of the trainable segment before, where it is needed."""


class StateAccess:
    """Reads and changes what rests in the tiers, parameter by parameter, in bounded memory."""

    def __init__(
        self,
        module_hooks: ModuleHooks,
        pager: Pager,
        records: StateStore,
        weights: WeightStore | None,
        states: dict[tuple[int, int], ParameterState],
        chunks: Sequence[Sequence[Chunk]],
        record_format: ChunkFormat,
        exchange: WeightExchange,
        before_writes: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            module_hooks, pager, records, weights, states: whom it works with.
            chunks: of each unit, those whose records this process keeps.
            record_format: of the records.
            exchange: brings what the records of other ranks hold, and the weights that follow from it. All ranks make the
                calls that read or replace main weights and states, in the same order, then.
            before_writes: as in `infinity.updates.stepper.Stepper`.
        """
        self._before_writes = before_writes
        self._exchange = exchange
        self._module_hooks = module_hooks
        self._pager = pager
        self._records = records
        self._weights = weights
        self._states = states
        self._chunks = chunks
        self.copies = pager.copies
        """Makes what is given out."""
        self.stream = RecordStream(records, weights, states, chunks)
        """All of a unit in one pass."""
        self.shared: SharedStream | None = None
        """The same of what all ranks keep; None if each keeps all."""
        if exchange.shares.is_divided:
            self.shared = SharedStream(self.stream, exchange.shares, exchange.division, module_hooks.units)
        self._saver: Saver | None = None
        self._elements_follow = False
        self.has_main_weights = record_format.main is not MainWeight.MODEL_WEIGHT
        """Whether main weights are something else than model weights."""
        self.has_halves = record_format.main is MainWeight.REMAINDER
        """Whether the model weight is one half of the main weight."""

    # ----------------------------------------------------------------------------------------------------- initialising

    def store(self, unit: Unit, originals: Sequence[torch.Tensor]) -> None:
        """Bring a unit under the engine: weights cast into its flat buffer and stored, main weights into the records.

        Args:
            unit: its ``flat`` is allocated and empty.
            originals: the parameters' values as passed to `initialize`, one per slot.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} has no flat buffer")
        base = unit.flat.tensor()
        base.zero_()
        for slot, original in zip(unit.layout.slots, originals, strict=True):
            unit.view(base, slot).copy_(original)
            if self.has_halves and self.shared is not None and slot.spec.is_trainable:
                # Other ranks keep parts of the main weights, and round them so.
                ordered = in_memory_order(original, slot).split(_PART_NUMEL)
                weights = unit.trainable_view(base)[slot.start : slot.stop].split(_PART_NUMEL)
                for part, weight in zip(ordered, weights, strict=True):
                    weight.copy_(split_bits(part.to("cpu", torch.float32))[0].view(torch.bfloat16))
        if self.has_main_weights:
            for chunk in self._chunks[unit.index]:
                self._store_main(unit, chunk, originals)
        self._write_weights(unit, base)

    def _store_main(self, unit: Unit, chunk: Chunk, originals: Sequence[torch.Tensor]) -> None:
        """Main weights into a fresh record; model weights that are one half of them into the unit's buffer."""
        with self._changing(unit, chunk, main_only=True) as workspace:
            for piece in chunk.pieces:
                original = in_memory_order(originals[piece.slot.index], piece.slot)
                workspace.write_main(_span(piece), original[piece.start : piece.stop])
                if self.has_halves:
                    unit.weights_of(chunk)[_span(piece)].copy_(workspace.weight[_span(piece)])

    def _write_weights(self, unit: Unit, base: torch.Tensor, changed: Sequence[Slot] | None = None) -> None:
        """Store a whole flat buffer, or as much of it as holds these slots."""
        self._let_save(unit)
        if self._weights is None or unit.stays_resident:
            return
        start, stop = 0, base.numel()
        if changed is not None:
            start = min(slot.offset_bytes for slot in changed) // RECORD_GRANULE * RECORD_GRANULE
            end = max(slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize for slot in changed)
            stop = min(stop, round_up(end, RECORD_GRANULE))
        written = self._weights.write_all(unit, base[start:stop].cpu(), start)
        if written is not None:
            written.wait()

    @contextlib.contextmanager
    def _changing(self, unit: Unit, chunk: Chunk, *, main_only: bool = False) -> Iterator[ChunkBuffer]:
        """A chunk in working memory, which is stored at the end of the ``with`` block, unless that raises."""
        self._let_save(unit)
        lease = self.stream.lease(unit, chunk)
        try:
            lease.wait()
            yield lease.workspace
            lease.write_back([], main_only=main_only)
        except BaseException:
            lease.discard()
            raise

    @contextlib.contextmanager
    def _reading(self, unit: Unit, chunk: Chunk) -> Iterator[ChunkBuffer]:
        """A chunk in working memory, of which nothing is stored."""
        lease = self.stream.lease(unit, chunk)
        try:
            lease.wait()
            yield lease.workspace
        finally:
            lease.discard()

    def wait_for_saver(self, saver: Saver | None) -> None:
        """Nothing of a unit is changed from now on before this one has saved it; None: there is none any more."""
        self._saver = saver

    def _let_save(self, unit: Unit) -> None:
        if self._saver is not None:
            self._saver.wait_for(unit)

    # ---------------------------------------------------------------------------------------------------------- reading

    def _pieces(self, unit: Unit, indices: Collection[int]) -> Iterator[tuple[Chunk, list[Piece]]]:
        """Chunks in which parameters of these slots lie, each with its pieces of them: of one slot, that is one."""
        for chunk in self._chunks[unit.index]:
            pieces = [piece for piece in chunk.pieces if piece.slot.index in indices]
            if pieces:
                yield chunk, pieces

    def main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the fp32 main weight (for a frozen parameter, of its weight), on the CPU, with the parameter's shape."""
        unit, slot = self._module_hooks.locate(parameter)
        return self.main_weights(unit, [slot])[slot.index]

    def main_weights(self, unit: Unit, slots: Sequence[Slot]) -> dict[int, torch.Tensor]:
        """Slot index -> the same, for some parameters of a unit. What holds pieces of several is read once."""
        recorded = [slot for slot in slots if self.has_main_weights and slot.spec.is_trainable]
        found = {slot.index: self._model_weight(unit, slot) for slot in slots if slot not in recorded}
        read = self._read(unit, [(slot, WEIGHT) for slot in recorded])
        return found | {index: values for (index, _), values in read.items()}

    def _model_weight(self, unit: Unit, slot: Slot) -> torch.Tensor:
        with self.copies.new(slot.spec.shape, slot.spec.stride, torch.float32) as made, self._pager.opened(unit):
            weight = _flat(unit.weight(slot))
            for start in range(0, slot.numel, _PART_NUMEL):
                made.write(start, weight[start : start + _PART_NUMEL].to("cpu", torch.float32))
            return made.finish()

    def _read(self, unit: Unit, wanted: Sequence[tuple[Slot, str]]) -> dict[tuple[int, str], torch.Tensor]:
        """(slot index, kind) -> a copy of the main weight (`WEIGHT`) or the state. Each record is read once."""
        kinds: dict[int, list[str]] = {}
        with contextlib.ExitStack() as stack:
            made = {}
            for slot, kind in wanted:
                kinds.setdefault(slot.index, []).append(kind)
                copy = self.copies.new(slot.spec.shape, slot.spec.stride, torch.float32)
                made[slot.index, kind] = stack.enter_context(copy)
            for chunk, pieces in self._pieces(unit, kinds):
                with self._reading(unit, chunk) as workspace:
                    if self.has_halves and any(WEIGHT in kinds[piece.slot.index] for piece in pieces):
                        self._bring_weights(unit, chunk, workspace)
                    for piece in pieces:
                        for kind in kinds[piece.slot.index]:
                            with made[piece.slot.index, kind].part(piece.start, piece.stop) as part:
                                workspace.read(kind, _span(piece), part)
            found = {key: copy.finish() for key, copy in made.items()}
        for slot, kind in wanted:
            what = "the main weight" if kind == WEIGHT else kind
            self._complete(f"{what} of '{slot.spec.fqn}'", unit, slot, found[slot.index, kind])
        return found

    def _complete(self, what: str, unit: Unit, slot: Slot, values: torch.Tensor) -> None:
        """``values``, fp32 in the order of a parameter, of which this rank has its share, get what the other ranks have."""
        shares, ranks = self._exchange.shares, self._exchange.ranks
        if shares.is_divided:
            parts = shares.parts_of_parameter(unit, slot)
            ranks.meet(what, [number for part in parts for number in part])
            ranks.gather_in_memory(what, _flat(values), parts, kind="states")

    def _bring_weights(self, unit: Unit, chunk: Chunk, workspace: ChunkBuffer) -> None:
        """The chunk's model weights, as they rest, into the workspace."""
        read = self.stream.bring_weights(unit, chunk, workspace.weight)
        if read is not None:
            read.wait()

    def has_place(self, parameter: torch.Tensor) -> bool:
        """Whether there is room for optimizer state of the parameter."""
        return self._state_of(parameter) is not None

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether an update or a load has given the parameter optimizer state, its main weight counted as such."""
        state = self._state_after_first(parameter)
        return state is not None and (not state.is_fresh or (self.has_main_weights and state.num_updates > 0))

    def state_names(self, parameter: torch.Tensor) -> Sequence[str] | None:
        """Names of the parameter's per-element states; None while it has none. Waits for nothing but its first update."""
        state = self._state_after_first(parameter)
        return None if state is None or state.is_fresh else self.stream.names_of(*self._module_hooks.locate(parameter))

    def _state_after_first(self, parameter: torch.Tensor) -> ParameterState | None:
        state = self._state_of(parameter)
        if state is not None and state.is_fresh:
            unit, _ = self._module_hooks.locate(parameter)
            self._pager.residency.await_update(unit)  # its first may be pending
        return state

    def _state_of(self, parameter: torch.Tensor) -> ParameterState | None:
        unit, slot = self._module_hooks.locate(parameter)
        return self._states.get((unit.index, slot.index))

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of the optimizer's state of a parameter, as torch would keep it; empty before its first update."""
        unit, slot = self._module_hooks.locate(parameter)
        names = self.stream.names_of(unit, slot)
        read = self._read(unit, [(slot, name) for name in names])
        return {**self.scalars(parameter), **{name: values for (_, name), values in read.items()}}

    def scalars(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of what of a parameter's state is not per element; empty before its first update."""
        state = self._state_of(parameter)
        if state is None or state.is_fresh:
            return {}
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.scalars.items()
        }

    # --------------------------------------------------------------------------------------------------------- modifying

    def load_state(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace the optimizer's state of a parameter. Per-element tensors have the parameter's shape; the rest is scalar.

        Where states are stored rounded, what `state` gave is stored as it was. Random numbers go on from the state's "step".

        Raises:
            ValueError: they do not fit; nothing has been changed.
        """
        unit, slot = self._module_hooks.locate(parameter)
        state = self._states.get((unit.index, slot.index))
        if state is None:
            if values:
                raise ValueError(f"'{slot.spec.fqn}' was frozen in infinity.initialize, so its state has no place")
            return
        self._let_save(unit)
        names = self._records.names_of(unit)
        if values:
            state.check(slot, names, values)
        num_updates = int(values.get("step", 0))
        tensors = {name: value for name, value in values.items() if name in names and isinstance(value, torch.Tensor)}
        scalars = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
            if name not in tensors
        }
        state.load(scalars, tuple(tensors) if values else None, num_updates)
        if self._elements_follow:
            return
        flats = {name: in_memory_order(tensor, slot) for name, tensor in tensors.items()}
        for chunk, (piece,) in self._pieces(unit, [slot.index]):
            with self._changing(unit, chunk) as workspace:
                for name, flat in flats.items():
                    workspace.write_state(name, _span(piece), flat[piece.start : piece.stop])

    @contextlib.contextmanager
    def elements_following(self) -> Iterator[None]:
        """Of what `load_state` gets inside the ``with`` block, the elements are put into `stream` after it."""
        self._elements_follow = True
        try:
            yield
        finally:
            self._elements_follow = False

    @contextlib.contextmanager
    def replacing(self, unit: Unit) -> Iterator[RecordStream]:
        """The unit's main weights and states are replaced by `stream` inside the ``with`` block."""
        self._let_save(unit)
        with self._pager.replacing(unit):
            yield self.stream

    def replacing_all(self, agree: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with`` block `replacing` and `load_main_weight` are for any units; see `WeightExchange.replacing`."""
        return self._exchange.replacing(self._module_hooks.units, agree)

    def load_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a parameter's main weight (for a frozen one, its weight); the model weight becomes its cast.

        Args:
            parameter: which.
            values: of the parameter's shape, any dtype.

        Raises:
            ValueError: another shape; nothing has been changed.
        """
        unit, slot = self._module_hooks.locate(parameter)
        if tuple(values.shape) != tuple(slot.spec.shape):
            raise ValueError(
                f"the main weight for '{slot.spec.fqn}' has shape {tuple(values.shape)}, not {tuple(slot.spec.shape)}"
            )
        self._let_save(unit)
        with self._pager.opened(unit):
            place = unit.weight(slot)
            if not self.has_main_weights or not slot.spec.is_trainable:
                place.copy_(values)
                self.store_modified(unit, [slot])
                return
            unit.outdate()
            main = in_memory_order(values, slot)
            self._exchange.before(unit)
            for chunk, (piece,) in self._pieces(unit, [slot.index]):
                weights, span = unit.weights_of(chunk), _span(piece)
                with self._changing(unit, chunk) as workspace:
                    workspace.weight.copy_(weights)
                    workspace.write_main(span, main[piece.start : piece.stop])
                    workspace.cast_main()
                    weights[span].copy_(workspace.weight[span])
                written = self.stream.write_weights(unit, chunk, weights)
                if written is not None:
                    written.wait()
            self._exchange.gather([unit])

    def resume_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Take over a saved main weight where the parameter, as it came, is its cast; elsewhere it was changed since."""
        _, slot = self._module_hooks.locate(parameter)
        if not self.has_main_weights or tuple(values.shape) != tuple(slot.spec.shape):
            return
        came, main = self.main_weight(parameter), values.cpu()
        casts = [main.to(slot.spec.dtype).float()]
        if slot.spec.dtype == torch.bfloat16:
            casts.append(split_bits(main.contiguous())[0].view(torch.bfloat16).float())
        is_same = functools.reduce(torch.logical_or, [cast == came for cast in casts])
        self.load_main_weight(parameter, torch.where(is_same, main, came))

    def store_modified(
        self, unit: Unit, changed: Sequence[Slot], before: torch.Tensor | None = None, *, is_outdating: bool = True
    ) -> None:
        """The weights of ``changed`` were changed in the open flat buffer: store them, and their main weights.

        A main weight whose model weight was not changed keeps its low bits; another becomes the new weight.

        Args:
            unit: whose.
            changed: which of its parameters.
            before: the trainable segment before the change, where it was kept.
            is_outdating: a graph over the weights as they were is not to be used any more.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        base = unit.flat.tensor()
        if is_outdating:
            unit.outdate()
        with self._exchange.changing(unit):
            if self.has_main_weights:
                for chunk, pieces in self._pieces(unit, {slot.index for slot in changed}):
                    self._store_changed(unit, chunk, pieces, before)
            self._write_weights(unit, base, changed)

    def _store_changed(self, unit: Unit, chunk: Chunk, pieces: Sequence[Piece], before: torch.Tensor | None) -> None:
        with self._changing(unit, chunk) as workspace:
            if not self.has_halves:
                workspace.cast_main()
            elif before is not None:
                workspace.weight.copy_(before[chunk.start : chunk.stop])
            else:
                self._bring_weights(unit, chunk, workspace)
            for piece in pieces:
                span = _span(piece)
                new = unit.weights_of(chunk)[span].to(workspace.weight.device)
                integer = {2: torch.int16, 4: torch.int32}[new.element_size()]
                is_kept = workspace.weight[span].view(integer) == new.view(integer)
                main = torch.empty(piece.numel, dtype=torch.float32, device=new.device)
                workspace.read_main(span, main)
                workspace.write_main(span, torch.where(is_kept, main, new.float()))

    # ------------------------------------------------------------------------------- written by others than the engine

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether only what the weights were before a write tells which elements it changed. See `Unit.before`."""
        return self.has_halves and unit.stays_resident and slot.spec.is_trainable

    def is_urgent(self, unit: Unit) -> bool:
        """Whether main weights follow, or other ranks write, too: neither must depend on when the unit is paged out."""
        if self._exchange.divides(unit):
            return True
        return self.has_main_weights and any(unit.layout.slots[i].spec.is_trainable for i in unit.dirty)

    def store_written(self, unit: Unit) -> None:
        """Store the weights in ``unit.dirty`` from the unit's flat buffer, and let main weights follow.

        It may be cut off anywhere and called again: what has been stored already is the same the second time.

        Raises:
            ModelError: nobody knows which elements were changed, so which main weights keep their low bits.
        """
        changed = [unit.layout.slots[index] for index in sorted(unit.dirty)]
        unknown = [slot for slot in changed if self.needs_before(unit, slot) and slot.index not in unit.before]
        if unknown:
            unit.forget_written(slot.index for slot in unknown)
            raise ModelError(
                f"parameter '{unknown[0].spec.fqn}' was written to in forward in a way that is seen too late to tell which of "
                "its fp32 main weights follow",
                cure="Write to it by its own methods or by .data (p.mul_(...), p.data.copy_(...)), or set config key "
                "'infinity.main_weights' to \"fp32\"",
                fqn=unknown[0].spec.fqn,
            )
        self._before_writes()
        before = None
        if unit.before and unit.flat is not None and unit.layout.trainable is not None:
            copy = unit.flat.tensor().clone()
            for index, values in unit.before.items():
                unit.view(copy, unit.layout.slots[index]).copy_(values)
            before = unit.trainable_view(copy)
        self.store_modified(unit, changed, before, is_outdating=False)
        unit.forget_changes()

    def restore(self, *, on_drives: bool = False) -> None:
        """Make the parameters ordinary again, with their weights in memory of their own: on a drive, if large ones are to be."""
        units = self._module_hooks.units

        def copy_of(unit: Unit, slot: Slot) -> torch.Tensor:
            if not on_drives:
                return self._pager.copy_of(unit, slot)
            with self._pager.opened(unit):
                return self.copies.copy(unit.weight(slot).cpu())

        copies = [[copy_of(unit, slot) for slot in unit.layout.slots] for unit in units]

        with uninterrupted():
            for unit, values in zip(units, copies, strict=True):
                unit.unbind()  # it may be gathered
                for slot, parameter, value in zip(unit.layout.slots, unit.parameters, values, strict=True):
                    let_go([parameter])
                    parameter.data = value
                    unit.let_views_look_at(slot, value)

    @property
    def is_divided(self) -> bool:
        """Whether ranks keep parts of the main weights, so that one alone cannot read them."""
        return self._exchange.shares.is_divided and self.has_main_weights

    def stored(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is stored of a parameter: a trainable one's main weight, on the CPU; a frozen one's weight, in its own dtype.

        Who calls it has failed, and maybe no other rank: where those keep parts of main weights, it is the model weight.
        """
        unit, slot = self._module_hooks.locate(parameter)
        if self.is_divided and slot.spec.is_trainable:
            logger.warning("'%s' is given back as its %s model weight", slot.spec.fqn, slot.spec.dtype)
            return self._pager.copy_for_user(unit, slot)
        return self.main_weight(parameter) if slot.spec.is_trainable else self._pager.copy_for_user(unit, slot)

    def gather(self, parameters: Sequence[nn.Parameter], *, compares: bool = False) -> list[Gathered]:
        """Open the parameters' units and keep them open. Returns what `scatter` needs.

        Args:
            compares: find what was changed by its contents, however it was written. Otherwise, by torch's counts of writes.

        Raises:
            BudgetTooSmallError: they do not fit into memory together.
        """
        units: dict[int, Unit] = {}
        for parameter in parameters:
            unit, _ = self._module_hooks.locate_any(parameter)
            self._let_save(unit)
            units[unit.index] = unit
        self._pager.residency.check_room(units.values())
        gathering: list[Gathered] = []
        try:
            for unit in units.values():
                with self._pager.held([unit]):
                    self.store_gathered(unit)  # by a block around this one: what it wrote so far is its own
                    gathering.append(Gathered(unit, _checksums(unit) if compares else None, self._kept(unit)))
                    unit.hold_for(gathering[-1])  # for longer than this block
        except BaseException:
            for gathered in gathering:
                gathered.unit.let_go_of(gathered)
            raise
        return gathering

    def store_gathered(self, unit: Unit) -> None:
        """Store what was written to a gathered unit so far, and let main weights follow: it is about to be updated."""
        held = [gathered for gathered in unit.gathered if isinstance(gathered, Gathered)]
        if held:
            self._store_since(held[0])
            self.note_updated(unit)

    def note_updated(self, unit: Unit) -> None:
        """A gathered unit holds other weights than when it was gathered, and those are stored."""
        for gathered in unit.gathered:
            if isinstance(gathered, Gathered):
                gathered.kept = self._kept(unit)
                if gathered.checksums is not None:
                    gathered.checksums = _checksums(unit)
        unit.accept_changes()

    def _kept(self, unit: Unit) -> torch.Tensor | None:
        """A copy of what else nobody would know any more: half of the main weights, if it rests nowhere but here."""
        if not self.has_halves or not unit.stays_resident or unit.flat is None or not unit.layout.trainable_numel:
            return None
        return unit.trainable_view(unit.flat.tensor()).clone()

    def scatter(self, gathering: Sequence[Gathered]) -> None:
        """The counterpart of `gather`."""
        with contextlib.ExitStack() as rest:
            for gathered in gathering:
                rest.callback(gathered.unit.let_go_of, gathered)
            for gathered in gathering:
                if gathered.unit.flat is None:
                    continue  # it went with the engine
                if self._store_since(gathered):
                    self.note_updated(gathered.unit)  # whoever else has gathered it
                gathered.unit.accept_changes()

    def _store_since(self, gathered: Gathered) -> bool:
        """Store what was written to a unit since its weights were noted; returns whether anything was."""
        unit = gathered.unit
        unit.note_changes()
        changed = set(unit.dirty)
        blocks = [gathered, *(each for each in unit.gathered if isinstance(each, Gathered))]
        before = next((each.checksums for each in blocks if each.checksums is not None), None)
        if before is not None:
            changed |= {index for index, now in _checksums(unit).items() if now != before[index]}
        if changed:
            self.store_modified(unit, [unit.layout.slots[index] for index in sorted(changed)], gathered.kept)
        return bool(changed)


def _checksums(unit: Unit) -> dict[int, int]:
    return {slot.index: checksum(unit.bytes_of(slot)) for slot in unit.layout.slots}


def _span(piece: Piece) -> slice:
    return slice(piece.offset, piece.offset + piece.numel)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def in_memory_order(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """1-D, the elements in the order in which the slot stores them."""
    if tuple(tensor.stride()) == slot.spec.stride and tuple(tensor.shape) == slot.spec.shape:
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=tensor.dtype, device=tensor.device)
    return _flat(ordered.copy_(tensor.detach().reshape(slot.spec.shape)))
