"""Weights at rest, and the main weights that follow them: stored first, and whenever others than the engine write to them.

Knows units, records and weights at rest. Reads nothing from where the model computes but the flat buffers that it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.packed_writes import accept_packed, read_packed, store_packed
from infinity.checkpoint.record_stream import RecordStream
from infinity.errors import ModelError
from infinity.numerics.chunk_format import RECORD_GRANULE, ChunkBuffer, ChunkFormat, MainWeight
from infinity.numerics.raw_bytes import checksum
from infinity.numerics.remainder import split_bits
from infinity.tiers.state_store import StateStore
from infinity.tiers.weight_exchange import WeightExchange
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk, ParameterSlice, Slot, in_memory_order, round_up
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from infinity.updates.stream import Saver

PART_NUMEL = 1 << 20
"""Elements that are converted at a time."""


@dataclass(eq=False)
class Gathered:
    """A unit that is held open for the user, who may write to it."""

    unit: Unit
    checksums: dict[int, int] | None
    """Of each slot's weights as they were last stored, where contents are compared; None: torch counts what is changed."""


class StoredWeights:
    """Stores weights from a unit's flat buffer: the `WeightWriter` of an engine."""

    def __init__(
        self,
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
            records, weights, states: whom it works with.
            chunks: of each unit, those whose records this process keeps.
            record_format: of the records.
            exchange: knows which weights other ranks keep in parts.
            before_writes: as in `infinity.updates.stepper.Stepper`: the last step is committed when it returns.
        """
        self._weights = weights
        self._chunks = chunks
        self.exchange = exchange
        self.before_writes = before_writes
        self.stream = RecordStream(records, weights, states, chunks)
        """All of a unit in one pass."""
        self._saver: Saver | None = None
        self.has_main_weights = record_format.main is not MainWeight.MODEL_WEIGHT
        """Whether main weights are something else than model weights."""
        self.splits_main_weights = record_format.main is MainWeight.REMAINDER
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
        store_packed(unit, originals, self._weights)
        for slot, original in zip(unit.layout.slots, originals, strict=True):
            if slot.spec.packed is not None:
                continue
            unit.view(base, slot).copy_(original)
            if self.splits_main_weights and self.exchange.shards.is_divided and slot.spec.is_trainable:
                # Other ranks keep parts of the main weights, and round them so.
                ordered = in_memory_order(original, slot).split(PART_NUMEL)
                weights = unit.trainable_view(base)[slot.start : slot.stop].split(PART_NUMEL)
                for part, weight in zip(ordered, weights, strict=True):
                    weight.copy_(split_bits(part.to("cpu", torch.float32))[0].view(torch.bfloat16))
        if self.has_main_weights:
            for chunk in self._chunks[unit.index]:
                self._store_main(unit, chunk, originals)
        self._write_weights(unit, base)

    def _store_main(self, unit: Unit, chunk: Chunk, originals: Sequence[torch.Tensor]) -> None:
        """Main weights into a fresh record; model weights that are one half of them into the unit's buffer."""
        with self.changing(unit, chunk, main_only=True) as workspace:
            for param_slice in chunk.slices:
                original = in_memory_order(originals[param_slice.slot.index], param_slice.slot)
                workspace.write_main(span_of(param_slice), original[param_slice.start : param_slice.stop])
                if self.splits_main_weights:
                    unit.weights_of(chunk)[span_of(param_slice)].copy_(workspace.weight[span_of(param_slice)])

    def _write_weights(self, unit: Unit, base: torch.Tensor, changed: Sequence[Slot] | None = None) -> None:
        """Store a whole flat buffer, or as much of it as holds these slots."""
        self.wait_for_save(unit)
        if self._weights is None or unit.is_persistent:
            return
        start, stop = 0, base.numel()
        if changed is not None:
            changed = [slot for slot in changed if slot.spec.packed is None]
            if not changed:
                return
            start = min(slot.offset_bytes for slot in changed) // RECORD_GRANULE * RECORD_GRANULE
            end = max(slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize for slot in changed)
            stop = min(stop, round_up(end, RECORD_GRANULE))
        written = self._weights.write_all(unit, base[start:stop].cpu(), start)
        if written is not None:
            written.wait()

    def changing(
        self, unit: Unit, chunk: Chunk, *, main_only: bool = False
    ) -> contextlib.AbstractContextManager[ChunkBuffer]:
        """A chunk in working memory, which is stored at the end of the ``with`` block, unless that raises."""
        self.wait_for_save(unit)
        return self.stream.opened(unit, chunk, stores=True, main_only=main_only)

    def wait_for_saver(self, saver: Saver | None) -> None:
        """Nothing of a unit is changed from now on before this one has saved it; None: there is none any more."""
        self._saver = saver

    def wait_for_save(self, unit: Unit) -> None:
        """Return when the saver, if there is one, needs the unit no more."""
        if self._saver is not None:
            self._saver.wait_for(unit)

    def slices(self, unit: Unit, indices: Collection[int]) -> Iterator[tuple[Chunk, list[ParameterSlice]]]:
        """Chunks in which parameters of these slots lie, each with its slices of them: of one slot, that is one."""
        for chunk in self._chunks[unit.index]:
            slices = [param_slice for param_slice in chunk.slices if param_slice.slot.index in indices]
            if slices:
                yield chunk, slices

    def bring_weights(self, unit: Unit, chunk: Chunk, workspace: ChunkBuffer) -> None:
        """The chunk's model weights, as they rest, into the workspace."""
        read = self.stream.bring_weights(unit, chunk, workspace.weight)
        if read is not None:
            read.wait()

    def store_modified(self, unit: Unit, changed: Sequence[Slot], *, is_outdating: bool = True) -> None:
        """The weights of ``changed`` were changed in the open flat buffer: store them, and their main weights.

        A main weight whose model weight was not changed keeps its low bits; another becomes the new weight.

        Args:
            unit: whose.
            changed: which of its parameters.
            is_outdating: a graph over the weights as they were is not to be used any more.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        for slot in changed:
            unit.stored_checksums.pop(slot.index, None)
        packed = [slot for slot in changed if slot.spec.packed is not None]
        error = accept_packed(unit, packed, self._weights) if packed else None
        unit.forget_written(slot.index for slot in packed)
        changed = [slot for slot in changed if slot.spec.packed is None]
        if error is not None and not changed:
            raise error
        if is_outdating:
            unit.outdate()
        base = unit.flat.tensor()
        with self.exchange.changing(unit):
            if self.has_main_weights:
                for chunk, slices in self.slices(unit, {slot.index for slot in changed}):
                    self._store_changed(unit, chunk, slices)
            self._write_weights(unit, base, changed)
        if error is not None:
            unit.forget_written(slot.index for slot in changed)
            del base  # or the error's frames would keep the unit in memory
            raise error

    def _store_changed(self, unit: Unit, chunk: Chunk, slices: Sequence[ParameterSlice]) -> None:
        with self.changing(unit, chunk) as workspace:
            # What the model weights were, without which half of the main weights is missing.
            if not self.splits_main_weights:
                workspace.cast_main()
            elif unit.is_persistent:
                for param_slice in slices:
                    before = in_memory_order(unit.before[param_slice.slot.index], param_slice.slot)
                    workspace.weight[span_of(param_slice)].copy_(before[param_slice.start : param_slice.stop])
            else:
                self.bring_weights(unit, chunk, workspace)
            for param_slice in slices:
                span = span_of(param_slice)
                new = unit.weights_of(chunk)[span].to(workspace.weight.device)
                integer = {2: torch.int16, 4: torch.int32}[new.element_size()]
                is_kept = workspace.weight[span].view(integer) == new.view(integer)
                main = torch.empty(param_slice.numel, dtype=torch.float32, device=new.device)
                workspace.read_main(span, main)
                workspace.write_main(span, torch.where(is_kept, main, new.float()))

    def packed_bytes(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        """The bytes of a packed weight as they rest; None if it is not packed, or rests in a flat buffer."""
        if slot.spec.packed is None or self._weights is None or unit.is_persistent:
            return None
        return read_packed(unit, slot, self._weights)

    # ------------------------------------------------------------------------------- written by others than the engine

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether only what the weights were before a write tells which elements it changed. See `Unit.before`."""
        if slot.spec.packed is not None:
            return unit.is_persistent  # elsewhere, what rests says it
        return self.splits_main_weights and unit.is_persistent and slot.spec.is_trainable

    def is_urgent(self, unit: Unit) -> bool:
        """Whether main weights follow, or other ranks write, too: neither must depend on when the unit is paged out."""
        if self.exchange.divides(unit):
            return True
        specs = [unit.layout.slots[index].spec for index in unit.dirty]
        if any(spec.packed is not None for spec in specs):
            return True
        return self.has_main_weights and any(spec.is_trainable for spec in specs)

    def store_written(self, unit: Unit) -> None:
        """Store the weights in ``unit.dirty`` from the unit's flat buffer, and let main weights follow.

        It may be cut off anywhere and called again: what has been stored already is the same the second time.

        Raises:
            ModelError: nobody knows which elements were changed, so which main weights keep their low bits.
        """
        changed = [unit.layout.slots[index] for index in sorted(unit.dirty)]
        unknown = [
            slot
            for slot in changed
            if slot.spec.packed is None and self.needs_before(unit, slot) and slot.index not in unit.before
        ]
        if unknown:
            unit.forget_written(slot.index for slot in unknown)
            raise ModelError(
                f"parameter '{unknown[0].spec.fqn}' was written to in forward in a way that is seen too late to tell which of "
                "its fp32 main weights follow",
                cure="Write to it by its own methods or by .data (p.mul_(...), p.data.copy_(...)), or set config key "
                "'infinity.main_weights' to \"fp32\"",
                fqn=unknown[0].spec.fqn,
            )
        self.before_writes()
        self.store_modified(unit, changed, is_outdating=bool(unit.gathered))
        unit.forget_changes()

    # --------------------------------------------------------------------------------------- held open for the user

    def begin_gathering(self, unit: Unit, *, compares: bool) -> Gathered:
        """The unit is in memory, and is going to be held; see `StateAccess.gather`."""
        self.store_gathered(unit)  # by a block around this one: what it wrote so far is its own
        self._keep_before(unit)
        return Gathered(unit, _checksums(unit) if compares else None)

    def store_gathered(self, unit: Unit) -> None:
        """Store what was written to a gathered unit so far, and let main weights follow."""
        if not unit.gathered:
            return
        unit.detect_writes()
        for gathered in (each for each in unit.gathered if isinstance(each, Gathered)):
            if gathered.checksums is not None:
                now = _checksums(unit)
                unit.on_write(index for index, checksum in now.items() if checksum != gathered.checksums[index])
                gathered.checksums = now
        if unit.dirty:
            self.store_written(unit)
            self._keep_before(unit)

    def _keep_before(self, unit: Unit) -> None:
        """Keep weights of which nobody could tell afterwards what they were: see `needs_before`."""
        for slot in unit.layout.slots:
            if self.needs_before(unit, slot) and slot.index not in unit.before:
                unit.save_before(slot)

    def scatter(self, gathering: Sequence[Gathered]) -> None:
        """The counterpart of `StateAccess.gather`: store what was changed."""
        with contextlib.ExitStack() as rest:
            for gathered in gathering:
                rest.callback(self._let_go, gathered)
            for gathered in gathering:
                if gathered.unit.flat is not None:  # else it went with the engine
                    self.store_gathered(gathered.unit)

    def _let_go(self, gathered: Gathered) -> None:
        gathered.unit.release_gathered(gathered)
        if not gathered.unit.gathered:
            gathered.unit.forget_changes()


def _checksums(unit: Unit) -> dict[int, int]:
    return {slot.index: checksum(unit.bytes_of(slot)) for slot in unit.layout.slots}


def span_of(param_slice: ParameterSlice) -> slice:
    """Where a slice lies in its chunk."""
    return slice(param_slice.offset, param_slice.offset + param_slice.numel)
