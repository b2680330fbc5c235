"""Gradients on their way from a GPU, until they are added to what waits.

Knows units' gradients and the ring in which they arrive; must not know where they wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.device.landing import Landing
from infinity.gradients.sources import flat_in_slot_order
from infinity.gradients.unit_grads import UnitGrads
from infinity.units.layout import Slot


@dataclass(frozen=True)
class Delivery:
    """Gradients of one unit that came together."""

    grads: UnitGrads
    slots: list[list[Slot]]
    """Whose are in each tensor of the download, one behind the other."""
    norms: Mapping[int, torch.Tensor]
    """Slot index -> 2-norm, of some of them."""


class Arrivals(Landing[Delivery]):
    """Where gradients arrive, in the order in which they came: one copy for a unit and dtype.

    That they are added in this order, and when, is the business of whoever takes them.
    """

    def bring(
        self, grads: UnitGrads, gradients: Mapping[Slot, torch.Tensor], norms: Mapping[int, torch.Tensor]
    ) -> None:
        """Start to bring the unit's ``gradients``, which are the caller's own and in the order of their slots, and fit."""
        flats = {slot: flat_in_slot_order(gradient, slot) for slot, gradient in gradients.items()}
        dtypes = dict.fromkeys(flat.dtype for flat in flats.values())
        slots = [[slot for slot, flat in flats.items() if flat.dtype == dtype] for dtype in dtypes]
        sources = [torch.cat([flats[slot] for slot in each]) if len(each) > 1 else flats[each[0]] for each in slots]
        self.start(sources, Delivery(grads, slots, norms))

    def slots_of(self, grads: UnitGrads) -> set[int]:
        """Indices of slots of which a gradient is on its way."""
        deliveries = [download.purpose for download in self.coming]
        return {slot.index for each in deliveries if each.grads is grads for slots in each.slots for slot in slots}

    def take_gradients(self) -> tuple[Delivery, dict[Slot, torch.Tensor]]:
        """Take the first ones out: with shape and strides of their parameters, until the next are started."""
        download = self.take_first()
        landed: dict[Slot, torch.Tensor] = {}
        for slots, values in zip(download.purpose.slots, download.values, strict=True):
            for slot, part in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
                landed[slot] = part.as_strided(slot.spec.shape, slot.spec.stride, part.storage_offset())
        return download.purpose, landed

    def forget(self) -> None:
        """What is on its way is not needed."""
        while self.coming:
            self.take_first()
