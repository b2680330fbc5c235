"""Stores weights from flat buffers, and the main weights that follow them: at first, and after a script's writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import InitVar, dataclass

import torch

from infinity.checkpoint.packed_writes import accept_packed, read_packed, store_packed
from infinity.checkpoint.record_stream import RecordStream
from infinity.errors import ModelError
from infinity.numerics.chunk_format import RECORD_GRANULE, WEIGHT, ChunkBuffer, ChunkFormat, MainWeight
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
"""Elements that are converted at a time: 4 MiB of fp32 working memory."""


@dataclass(eq=False)
class Gathered:
    """A unit that is held open for the user, who may write to its weights."""

    unit: Unit
    checksums: dict[int, int] | None
    """Slot index -> checksum of its weights when last stored. None: changes are found by torch's version counters."""


@dataclass(eq=False)
class StoredWeights:
    """Stores weights from a unit's flat buffer: the `WeightWriter` of an engine."""

    records: InitVar[StateStore]
    _weights: WeightStore | None
    """None if all units are resident."""
    states: InitVar[dict[tuple[int, int], ParameterState]]
    _chunks: Sequence[Sequence[Chunk]]
    """Per unit, the chunks whose records this process keeps."""
    record_format: InitVar[ChunkFormat]
    exchange: WeightExchange
    """Knows which weights other ranks keep in shards."""
    before_writes: Callable[[], None] = lambda: None
    """Called before each write. In a durable run, it returns when the last step is committed."""
    _saver: Saver | None = None

    def __post_init__(
        self, records: StateStore, states: dict[tuple[int, int], ParameterState], record_format: ChunkFormat
    ) -> None:
        self.stream = RecordStream(records, self._weights, states, self._chunks)
        """Reads or replaces all of a unit in one pass."""
        self.has_main_weights = record_format.main is not MainWeight.MODEL_WEIGHT
        """Whether main weights differ from model weights: they do not if the model is fp32."""
        self.splits_main_weights = record_format.main is MainWeight.REMAINDER
        """Whether the bf16 model weight is the upper half of the main weight, and the record has the lower half."""

    # ----------------------------------------------------------------------------------------------------- initialising

    def store(self, unit: Unit, originals: Sequence[torch.Tensor]) -> None:
        """Store a unit for the first time: weights are cast into its flat buffer, main weights go into the records.

        Args:
            unit: its ``flat`` is allocated and empty.
            originals: the parameters' values as passed to `initialize`, one per slot.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} has no flat buffer")
        base = unit.flat.tensor()
        # The padding between slots is stored, too, and must not be what memory held before.
        base.zero_()
        store_packed(unit, originals, self._weights)
        for slot, original in zip(unit.layout.slots, originals, strict=True):
            if slot.spec.packed is not None:
                continue
            unit.view(base, slot).copy_(original)
            if self.splits_main_weights and self.exchange.shards.is_divided and slot.spec.is_trainable:
                # `split_bits` rounds ties away from zero, torch's copy_ to even. `_store_main` does so for this rank's
                # shard; here it is done for the weights of the other ranks' shards, or ranks would differ in a bit.
                ordered = in_memory_order(original, slot).split(PART_NUMEL)
                weights = unit.trainable_view(base)[slot.start : slot.stop].split(PART_NUMEL)
                for part, weight in zip(ordered, weights, strict=True):
                    weight.copy_(split_bits(part.to("cpu", torch.float32))[0].view(torch.bfloat16))
        if self.has_main_weights:
            for chunk in self._chunks[unit.index]:
                self._store_main(unit, chunk, originals)
        self._write_weights(unit, base)

    def _store_main(self, unit: Unit, chunk: Chunk, originals: Sequence[torch.Tensor]) -> None:
        """Write main weights into a new record. If they are split, write their upper halves into the flat buffer."""
        # States are zeros until the first update: they are neither written nor, later, read.
        with self.changing(unit, chunk, main_only=True) as workspace:
            for param_slice in chunk.slices:
                original = in_memory_order(originals[param_slice.slot.index], param_slice.slot)
                workspace.write(WEIGHT, span_of(param_slice), original[param_slice.start : param_slice.stop])
                if self.splits_main_weights:
                    unit.weights_of(chunk)[span_of(param_slice)].copy_(workspace.weight[span_of(param_slice)])

    def _write_weights(self, unit: Unit, base: torch.Tensor, changed: Sequence[Slot] | None = None) -> None:
        """Store a flat buffer, or the part of it that holds these slots."""
        self.wait_for_save(unit)
        if self._weights is None or unit.is_persistent:
            return
        start, stop = 0, base.numel()
        if changed is not None:
            changed = [slot for slot in changed if slot.spec.packed is None]
            if not changed:
                return
            # Direct I/O writes whole blocks of 4096 bytes. For slots at bytes [5000, 9000): [4096, 12288) are written.
            start = min(slot.offset_bytes for slot in changed) // RECORD_GRANULE * RECORD_GRANULE
            end = max(slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize for slot in changed)
            stop = min(stop, round_up(end, RECORD_GRANULE))
        written = self._weights.write_all(unit, base[start:stop].cpu(), start)
        if written is not None:
            written.wait()

    def changing(self, unit: Unit, chunk: Chunk, *, main_only: bool = False) -> AbstractContextManager[ChunkBuffer]:
        """A chunk in working memory. It is stored at the end of the ``with`` block, unless that raises."""
        self.wait_for_save(unit)
        return self.stream.opened(unit, chunk, stores=True, main_only=main_only)

    def wait_for_saver(self, saver: Saver | None) -> None:
        """From now on, units are changed only after this background save has written them. None: no save is running."""
        self._saver = saver

    def wait_for_save(self, unit: Unit) -> None:
        """Return when the running background save, if any, has written the unit."""
        if self._saver is not None:
            self._saver.wait_for(unit)

    def slices(self, unit: Unit, indices: Collection[int]) -> Iterator[tuple[Chunk, list[ParameterSlice]]]:
        """Chunks that hold parts of these slots, each with its slices of them."""
        for chunk in self._chunks[unit.index]:
            slices = [param_slice for param_slice in chunk.slices if param_slice.slot.index in indices]
            if slices:
                yield chunk, slices

    def bring_weights(self, unit: Unit, chunk: Chunk, workspace: ChunkBuffer) -> None:
        """Read the chunk's stored model weights into the workspace."""
        read = self.stream.bring_weights(unit, chunk, workspace.weight)
        if read is not None:
            read.wait()

    def store_modified(self, unit: Unit, changed: Sequence[Slot], *, is_outdating: bool = True) -> None:
        """Store the weights of ``changed``, which were written to in the open flat buffer, and their main weights.

        Args:
            is_outdating: whether autograd graphs over the old weights become invalid.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        for slot in changed:
            unit.stored_checksums.pop(slot.index, None)
        # Packed weights that do not fit their format get their old values back. That error is raised last, when the
        # other weights are stored.
        packed = [slot for slot in changed if slot.spec.packed is not None]
        error = accept_packed(unit, packed, self._weights) if packed else None
        unit.forget_written(slot.index for slot in packed)
        changed = [slot for slot in changed if slot.spec.packed is None]
        if error is not None and not changed:
            raise error
        if is_outdating:
            unit.outdate()
        base = unit.flat.tensor()
        self.exchange.before(unit)
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
            # An element's main weight keeps its low bits if its model weight is the same as before the write. With bf16
            # weights [1.0, 2.0] of main weights [1.001, 2.001], after p[1] = 3: main weights [1.001, 3.0].
            # First, the weights before the write go into the workspace: the cast of the fp32 main weights, a copy that
            # a resident unit has kept, or what is stored.
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
                # Compared as bits: -0.0 == 0.0, and a NaN equals nothing.
                integer = {2: torch.int16, 4: torch.int32}[new.element_size()]
                is_kept = workspace.weight[span].view(integer) == new.view(integer)
                main = torch.empty(param_slice.numel, dtype=torch.float32, device=new.device)
                workspace.read(WEIGHT, span, main)
                workspace.write(WEIGHT, span, torch.where(is_kept, main, new.float()))

    def packed_bytes(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        """The stored bytes of a packed weight; None if it is not packed, or its unit is resident."""
        if slot.spec.packed is None or self._weights is None or unit.is_persistent:
            return None
        return read_packed(unit, slot, self._weights)

    # ------------------------------------------------------------------------------- written by others than the engine

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether the unit must keep a copy of the weights before a write. See `Unit.before`."""
        # A resident unit has its weights nowhere else. Others read the old ones from where they are stored. fp32 main
        # weights need no copy: their cast is the old model weight.
        if slot.spec.packed is not None:
            return unit.is_persistent
        return self.splits_main_weights and unit.is_persistent and slot.spec.is_trainable

    def is_urgent(self, unit: Unit) -> bool:
        """Whether written weights must be stored now, and not when the unit is paged out."""
        # All ranks store such a write together, at the same point of their scripts. They do not page units out at the
        # same time.
        if self.exchange.divides(unit):
            return True
        specs = [unit.layout.slots[index].spec for index in unit.dirty]
        if any(spec.packed is not None for spec in specs):
            return True
        # The next update starts from the main weights, which must have followed by then.
        return self.has_main_weights and any(spec.is_trainable for spec in specs)

    def store_written(self, unit: Unit) -> None:
        """Store the weights in ``unit.dirty`` from the unit's flat buffer, and update their main weights.

        After an interrupt it may be called again: it then stores the same values once more.

        Raises:
            ModelError: it is not known which elements were written, so not which main weights keep their low bits.
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
                f"parameter '{unknown[0].spec.fqn}' was written to in forward in a way that the engine notices too "
                "late to update its fp32 main weights",
                cure="Write to it by its own methods or by .data (p.mul_(...), p.data.copy_(...)), or set config key "
                "'infinity.main_weights' to \"fp32\"",
                fqn=unknown[0].spec.fqn,
            )
        # The commit of the last step may still be running, and must not see these writes.
        self.before_writes()
        self.store_modified(unit, changed, is_outdating=bool(unit.gathered))
        unit.forget_changes()

    # --------------------------------------------------------------------------------------- held open for the user

    def begin_gathering(self, unit: Unit, *, compares: bool) -> Gathered:
        """Prepare a unit that is in memory and will be held open. See `StateAccess.gather`."""
        self.store_gathered(unit)  # what an outer `with` block has written so far
        self._keep_before(unit)
        return Gathered(unit, _checksums(unit) if compares else None)

    def store_gathered(self, unit: Unit) -> None:
        """Store what was written to a gathered unit so far, and update main weights."""
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
        """Copy the weights whose old values could not be found after a write: see `needs_before`."""
        for slot in unit.layout.slots:
            if self.needs_before(unit, slot) and slot.index not in unit.before:
                unit.save_before(slot)

    def scatter(self, gathering: Sequence[Gathered]) -> None:
        """End `StateAccess.gather`: store what was changed, and release the units."""
        with ExitStack() as rest:
            for gathered in gathering:
                # All units are released, also if storing one of them fails.
                rest.callback(self._let_go, gathered)
            for gathered in gathering:
                if gathered.unit.flat is not None:  # else the engine was closed meanwhile
                    self.store_gathered(gathered.unit)

    def _let_go(self, gathered: Gathered) -> None:
        gathered.unit.release_gathered(gathered)
        if not gathered.unit.gathered:
            gathered.unit.forget_changes()


def _checksums(unit: Unit) -> dict[int, int]:
    return {slot.index: checksum(unit.bytes_of(slot)) for slot in unit.layout.slots}


def span_of(param_slice: ParameterSlice) -> slice:
    """The elements of its chunk that a slice of a parameter takes."""
    return slice(param_slice.offset, param_slice.offset + param_slice.numel)
