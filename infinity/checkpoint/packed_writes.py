"""Packs frozen weights when an engine is made, and handles a script's writes to packed weights.

A written value is kept if it packs without loss, like a value that was unpacked from the format. Any other value is an
error, and the weight gets its old values back: rounding it would change a script's numbers silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.errors import ModelError
from infinity.packed.formats import NotFiniteError
from infinity.packed.sources import source_of
from infinity.packed.stored_form import PackedSlot, StoredForm
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Slot
from infinity.units.unit import Unit

MERGE_CURE = (
    "To merge adapters, call engine.close() first: the model then has the base's unpacked weights as ordinary ones, and "
    "merge_and_unload() works. To train or edit this weight, leave it out of infinity.frozen_dtype"
)


def store_packed(unit: Unit, originals: Sequence[torch.Tensor], weights: WeightStore | None) -> None:
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


def read_packed(unit: Unit, slot: Slot, weights: WeightStore) -> torch.Tensor:
    """The stored bytes of a packed weight: uint8, on the CPU."""
    (packed,) = (each for each in StoredForm(unit.layout).slots if each.slot is slot)
    stored = torch.empty(packed.num_bytes, dtype=torch.uint8, device="cpu")
    weights.read_packed(unit, packed, stored)
    return stored


def accept_packed(unit: Unit, slots: Sequence[Slot], weights: WeightStore | None) -> ModelError | None:
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
        cure=MERGE_CURE,
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
