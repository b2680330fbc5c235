"""Stores weights from flat buffers, and the main weights that follow them: at first, and after a script's writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

import torch

from infinity.checkpoint.record_stream import RecordStream
from infinity.errors import ModelError
from infinity.numerics.chunk_format import RECORD_GRANULE, WEIGHT, ChunkFormat, MainWeight
from infinity.numerics.raw_bytes import checksum
from infinity.numerics.remainder import split_bits
from infinity.packed.formats import NotFiniteError
from infinity.packed.sources import source_of
from infinity.packed.stored_form import PackedSlot, StoredForm
from infinity.tiers.divided_weights import WeightExchange
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk, ParameterSlice, Slot, in_memory_order, round_up
from infinity.units.unit import Unit
from infinity.updates.stream import Saver

_MERGE_CURE = (
    "To merge adapters, call engine.close() first: the model then has the base's unpacked weights as ordinary ones, and "
    "merge_and_unload() works. To train or edit this weight, leave it out of infinity.frozen_dtype"
)
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

    stream: RecordStream
    """Reads or replaces all of a unit in one pass."""
    record_format: InitVar[ChunkFormat]
    exchange: WeightExchange
    """Knows which weights other ranks keep in shards."""
    before_writes: Callable[[], None] = lambda: None
    """Called before each write. In a durable run, it returns when the last step is committed."""
    _saver: Saver | None = None

    def __post_init__(self, record_format: ChunkFormat) -> None:
        self._weights = self.stream.weights
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
        _store_packed(unit, originals, self._weights)
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
            for chunk in self.stream.chunks[unit.index]:
                self._store_main(unit, chunk, originals)
        self._write_weights(unit, base)

    def _store_main(self, unit: Unit, chunk: Chunk, originals: Sequence[torch.Tensor]) -> None:
        """Write main weights into a new record. If they are split, write their upper halves into the flat buffer."""
        # States are zeros until the first update: they are neither written nor, later, read.
        with self.stream.changing(unit, chunk, main_only=True) as (workspace, _):
            for param_slice in chunk.slices:
                original = in_memory_order(originals[param_slice.slot.index], param_slice.slot)
                workspace.write(WEIGHT, _span_of(param_slice), original[param_slice.start : param_slice.stop])
                if self.splits_main_weights:
                    unit.weights_of(chunk)[_span_of(param_slice)].copy_(workspace.weight[_span_of(param_slice)])

    def _write_weights(self, unit: Unit, base: torch.Tensor, changed: Sequence[Slot] | None = None) -> None:
        """Store a flat buffer, or the part of it that holds these slots."""
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
        self._weights.write_all(unit, base[start:stop].cpu(), start)

    def wait_for_saver(self, saver: Saver | None) -> None:
        """From now on, units are changed only after this background save has written them. None: no save is running."""
        self._saver = saver

    def wait_for_save(self, unit: Unit) -> None:
        """Return when the running background save, if any, has written the unit."""
        if self._saver is not None:
            self._saver.wait_for(unit)

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
        error = _accept_packed(unit, packed, self._weights) if packed else None
        unit.forget_written(slot.index for slot in packed)
        changed = [slot for slot in changed if slot.spec.packed is None]
        if error is not None and not changed:
            raise error
        if is_outdating:
            unit.outdate()
        base = unit.flat.tensor()
        self.exchange.before(unit)
        self.wait_for_save(unit)
        if self.has_main_weights:
            indices = {slot.index for slot in changed}
            for chunk in self.stream.chunks[unit.index]:
                slices = [param_slice for param_slice in chunk.slices if param_slice.slot.index in indices]
                if slices:
                    self._store_changed(unit, chunk, slices)
        self._write_weights(unit, base, changed)
        if error is not None:
            unit.forget_written(slot.index for slot in changed)
            del base  # or the error's frames would keep the unit in memory
            raise error

    def _store_changed(self, unit: Unit, chunk: Chunk, slices: Sequence[ParameterSlice]) -> None:
        with self.stream.changing(unit, chunk, brings_weights=not unit.is_persistent) as (workspace, _):
            # An element's main weight keeps its low bits if its model weight is the same as before the write. With bf16
            # weights [1.0, 2.0] of main weights [1.001, 2.001], after p[1] = 3: main weights [1.001, 3.0].
            # First, the workspace gets the weights before the write: the cast of the fp32 main weights, or a copy that a
            # resident unit has kept, or what is stored (it has that already).
            if not self.splits_main_weights:
                workspace.cast_main()
            elif unit.is_persistent:
                for param_slice in slices:
                    before = in_memory_order(unit.before[param_slice.slot.index], param_slice.slot)
                    workspace.weight[_span_of(param_slice)].copy_(before[param_slice.start : param_slice.stop])
            for param_slice in slices:
                span = _span_of(param_slice)
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
        (packed,) = (each for each in StoredForm(unit.layout).slots if each.slot is slot)
        stored = torch.empty(packed.num_bytes, dtype=torch.uint8, device="cpu")
        self._weights.read_packed(unit, packed, stored)
        return stored

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
        """Prepare a unit that is in memory and will be held open. See `StateAccess.gathered`."""
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

    def end_gathering(self, gathered: Gathered) -> None:
        """Release the unit."""
        gathered.unit.release_gathered(gathered)
        if not gathered.unit.gathered:
            gathered.unit.forget_changes()


def _checksums(unit: Unit) -> dict[int, int]:
    return {slot.index: checksum(unit.bytes_of(slot)) for slot in unit.layout.slots}


def _span_of(param_slice: ParameterSlice) -> slice:
    """The elements of its chunk that a slice of a parameter takes."""
    return slice(param_slice.offset, param_slice.offset + param_slice.numel)


# -------------------------------------------------------------------------------------------------------- packed weights
# A written value is kept if it packs without loss, like a value that was unpacked from the format. Any other value is an
# error, and the weight gets its old values back: rounding it would change a script's numbers silently.


def _store_packed(unit: Unit, originals: Sequence[torch.Tensor], weights: WeightStore | None) -> None:
    """Pack a unit's packed weights, store the bytes, and put the unpacked values into the unit's flat buffer.

    Args:
        unit: its flat buffer is allocated.
        originals: the parameters' values before, one per slot.
        weights: None if no unit's weights rest outside of flat buffers.

    Raises:
        ModelError: a weight is not finite.
    """
    form = StoredForm(unit.layout)
    if not form.slots:
        return
    memory = unit.memory
    # `landing`: the end of the flat buffer, from which `unpack` works front to back without other memory. On a GPU,
    # packing is done in host memory, and the bytes are copied once.
    landing = form.landing(memory)
    if memory.device.type != "cpu":
        landing = torch.empty(form.packed_bytes, dtype=torch.uint8, device="cpu")
    # Padding before the first packed weight: it is stored, too, and must not be what memory held before.
    landing[: form.slots[0].start].zero_()
    for packed in form.slots:
        original, spec = originals[packed.slot.index], packed.slot.spec
        # Bytes of quantized files, or of an engine before, are stored as they are: packing their values again could
        # round twice.
        source = source_of(unit.parameters[packed.slot.index], spec.packed, packed.num_bytes)
        if source is not None:
            packed.of(landing).copy_(source)
            continue
        values = original.detach().reshape(-1)
        _pack(packed, values if values.dtype == spec.dtype else _Cast(values, spec.dtype), landing)
    # A resident unit is packed and unpacked as well, although nothing is stored. Otherwise the numbers would depend on
    # the budget.
    if weights is not None and not unit.is_persistent:
        weights.write_packed(unit, 0, landing)
    form.unpack(landing.to(memory.device), memory)


class _Cast:
    """A 1-D tensor that is cast slice by slice, as `pack` reads it: no cast copy of the whole is in memory."""

    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        self._values = values
        self._dtype = dtype

    def numel(self) -> int:
        return self._values.numel()

    def __getitem__(self, span: slice) -> torch.Tensor:
        return self._values[span].to(self._dtype)


def _pack(packed: PackedSlot, values: torch.Tensor | _Cast, landing: torch.Tensor) -> None:
    try:
        packed.format.pack(values, packed.slot.spec.shape, packed.of(landing))
    except NotFiniteError:
        raise ModelError(
            f"parameter '{packed.slot.spec.fqn}' has values that are NaN or infinite, which {packed.format.name} cannot store",
            cure="Look at where it was loaded from; or leave it out of infinity.frozen_dtype by a pattern",
            fqn=packed.slot.spec.fqn,
        ) from None


def _accept_packed(unit: Unit, slots: Sequence[Slot], weights: WeightStore | None) -> ModelError | None:
    """Store what was written to packed weights in the open flat buffer, or put back what was there.

    Returns:
        The error to raise when the caller has stored the rest; None if everything was stored.
    """
    # Where packed bytes of each weight are stored, and the flat buffer (uint8) with its unpacked values.
    form, memory = StoredForm(unit.layout), unit.memory
    error: ModelError | None = None
    for packed in form.slots:
        if packed.slot in slots:
            error = _accept(unit, packed, memory, None if unit.is_persistent else weights) or error
    return error


def _accept(unit: Unit, packed: PackedSlot, memory: torch.Tensor, weights: WeightStore | None) -> ModelError | None:
    spec, written = packed.slot.spec, packed.values(memory)
    stored = torch.empty(packed.num_bytes, dtype=torch.uint8, device="cpu")
    # The values before the write: unpacked from what is stored, or, for a unit that rests in its flat buffer alone, a
    # copy that the unit kept.
    before = unit.before.get(packed.slot.index)
    if weights is not None:
        weights.read_packed(unit, packed, stored)
        before = torch.empty(packed.slot.numel, dtype=spec.dtype, device=memory.device)
        packed.format.unpack(stored.to(memory.device), spec.shape, before)
    before = None if before is None else before.reshape(-1)
    if before is not None and _is_same(before, written):
        return None
    as_packed = _packed_and_back(packed, written, stored)
    if as_packed is not None and _is_same(as_packed, written):
        if weights is not None:
            weights.write_packed(unit, packed.start, stored)
        else:
            unit.save_before(packed.slot)
        return None
    if before is None:
        # No copy was kept: the nearest values that can be stored. They do not depend on where the unit rests.
        before = torch.zeros_like(written) if as_packed is None else as_packed
    written.copy_(before)
    return ModelError(
        f"parameter '{spec.fqn}' is stored as {packed.format.name}, which cannot store the written values exactly: "
        "the parameter keeps its old values",
        cure=_MERGE_CURE,
        fqn=spec.fqn,
    )


def _packed_and_back(packed: PackedSlot, values: torch.Tensor, stored: torch.Tensor) -> torch.Tensor | None:
    """Pack values into ``stored``, and return what unpacking gives; None if they are not finite."""
    spec = packed.slot.spec
    try:
        packed.format.pack(values, spec.shape, stored)
    except NotFiniteError:
        return None
    found = torch.empty_like(values)
    packed.format.unpack(stored.to(values.device), spec.shape, found)
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # By bits: 0.0 == -0.0, but they are not stored the same, and a NaN equals nothing.
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
