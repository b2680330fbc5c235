"""Packed weights as others than the engine write to them: when they are stored first, and whenever a script changes them.

Knows units, formats and weights at rest. What is written to a packed weight is kept if it can be packed without loss, as values
are that were unpacked from this format. Anything else is put back, and an error: rounding it would change a script's numbers
without a word.
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
    """Pack a unit's weights where that is asked for, store them, and put what they become into its flat buffer.

    Units that stay in memory as well: else numbers would depend on the budget.

    Raises:
        ModelError: a weight is not finite.
    """
    form = StoredForm(unit.layout)
    if not form.slots:
        return
    memory = unit.memory
    landing = form.landing(memory)
    if memory.device.type != "cpu":
        landing = torch.empty(form.packed_bytes, dtype=torch.uint8, device="cpu")
    landing[: form.slots[0].start].zero_()
    for packed in form.slots:
        original, spec = originals[packed.slot.index], packed.slot.spec
        source = source_of(unit.parameters[packed.slot.index], spec.packed, packed.num_bytes)
        if source is not None:
            packed.of(landing).copy_(source)
            continue
        values = original.detach().reshape(-1)
        _pack(packed, values if values.dtype == spec.dtype else _Cast(values, spec.dtype), landing)
    if weights is not None and not unit.is_persistent:
        weights.write_packed(unit, 0, landing)
    form.unpack(landing.to(memory.device), memory)


class _Cast:
    """Values that are cast part by part, as they are asked for."""

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
    """The bytes of a packed weight as they rest."""
    (packed,) = (each for each in StoredForm(unit.layout).slots if each.slot is slot)
    stored = torch.empty(packed.num_bytes, dtype=torch.uint8, device="cpu")
    weights.read_packed(unit, packed, stored)
    return stored


def accept_packed(unit: Unit, slots: Sequence[Slot], weights: WeightStore | None) -> ModelError | None:
    """Store what was written to packed weights in the open flat buffer, or put back what was there.

    Returns:
        What to raise, when the rest is stored: None if all was stored.
    """
    form, memory = StoredForm(unit.layout), unit.memory
    error: ModelError | None = None
    for packed in form.slots:
        if packed.slot in slots:
            error = _accept(unit, packed, memory, None if unit.is_persistent else weights) or error
    return error


def _accept(unit: Unit, packed: PackedSlot, memory: torch.Tensor, weights: WeightStore | None) -> ModelError | None:
    spec, written = packed.slot.spec, packed.values(memory)
    stored = torch.empty(packed.num_bytes, dtype=torch.uint8, device="cpu")
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
    if before is None:  # nobody kept it: what is nearest, so that numbers do not depend on where the unit rests
        before = torch.zeros_like(written) if as_packed is None else as_packed
    written.copy_(before)
    return ModelError(
        f"parameter '{spec.fqn}' is stored as {packed.format.name}, which has no room for what was written to it: it has its "
        "values of before",
        cure=MERGE_CURE,
        fqn=spec.fqn,
    )


def _packed_and_back(packed: PackedSlot, values: torch.Tensor, stored: torch.Tensor) -> torch.Tensor | None:
    """What values become, and in ``stored`` their packed bytes; None if they are not finite."""
    spec = packed.slot.spec
    try:
        packed.format.pack(values, spec.shape, stored)
    except NotFiniteError:
        return None
    found = torch.empty_like(values)
    packed.format.unpack(stored.to(values.device), spec.shape, found)
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
