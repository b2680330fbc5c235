"""The main gradients of one unit: in which memory and dtype they wait, what of them is spilled, and what
is arriving."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch

from infinity.device.download_ring import DownloadRing
from infinity.gradients.sources import GradientBuffer
from infinity.units.layout import Slot, in_memory_order
from infinity.units.unit import Unit
from swapper import Extent


@dataclass(slots=True, eq=False)
class UnitGrads:
    """The state of one unit's main gradients. Touched under the engine lock only."""

    unit: Unit
    """The unit. Never changes."""
    stays_in_ram: bool
    """Whether they stay in RAM: as the plan says, until they become wider than there is room for."""
    buffer: GradientBuffer | None = None
    """Their memory, until `detach_buffer`: for good if they stay, else for as long as there is room."""
    is_unchanged: bool = False
    """Whether what is spilled is what is in `buffer`: from a look at them until `on_change`, or the buffer's end."""
    number: int = 0
    """Counts the buffers of all units that were taken for a time: the smallest number was taken first."""
    extent: Extent | None = None
    """Where they are spilled. Allocated once, at the first spill."""
    spilled_dtype: torch.dtype | None = None
    """The dtype in which they are spilled; None when they are used up."""
    spilled_span: tuple[int, int] | None = None
    """Elements [start, stop) that alone were spilled, the last time; None: all."""
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    """Slot index -> 2-norm of what is spilled, or of what nobody but the store can have changed in RAM. Kept beyond that, it
    would pass for the norm of later gradients."""
    present: set[int] = field(default_factory=set)
    """Indices of slots with a gradient: from the first one that is added until all are used up or dropped."""
    zeros: set[int] = field(default_factory=set)
    """Indices of others, whose gradient is zero and not written as such yet."""
    is_unscaled: bool = False
    """Whether they have been divided by the loss scale: from the first look at them until they are used up or dropped."""

    def slots(self) -> list[Slot]:
        """The parameters that have a gradient in memory or on NVMe."""
        return [slot for slot in self.unit.layout.slots if slot.index in self.present]

    def on_change(self) -> None:
        """The gradients in memory have changed, or will: spilled values and norms are outdated."""
        self.is_unchanged = False
        self.norms.clear()

    def detach_buffer(self) -> GradientBuffer:
        """The unit's memory, which is the caller's from now on."""
        if self.buffer is None:
            raise RuntimeError(f"the gradients of unit {self.unit.name} are in no memory")
        buffer, self.buffer, self.is_unchanged = self.buffer, None, False
        return buffer

    def update_norms(
        self, norms: Mapping[int, torch.Tensor], gradients: Mapping[Slot, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """Gradients were added, so what was known is over; their own ``norms`` count where nothing was there before, or is
        lost in ``dtype``."""
        # A norm of a sum does not follow from the norms of its terms.
        for slot, gradient in gradients.items():
            self.norms.pop(slot.index, None)
            is_exact = dtype in (torch.float32, gradient.dtype)
            if is_exact and slot.index in norms and slot.index not in self.present:
                self.norms[slot.index] = norms[slot.index]

    def drop(self, slots: set[int]) -> None:
        """Forget these slots' gradients. With the last one, the unit's dtype and scale are forgotten, too."""
        self.present -= slots
        self.zeros -= slots
        for index in slots:
            self.norms.pop(index, None)
        if not self.present and not self.zeros:  # the next gradients come with the scale, in a dtype of their own
            self.spilled_dtype, self.is_unscaled = None, False


@dataclass(frozen=True)
class MainGradDtype:
    """The dtype in which gradients wait for their update."""

    dtype: torch.dtype = torch.float32
    """fp32, or bf16 if that is the compute dtype."""
    rounds: bool = False
    """Whether the sum of several gradients may be rounded to ``dtype``. Without, it is kept as fp32."""

    def after(
        self, current: torch.dtype, gradients: Mapping[Slot, torch.Tensor], present: Container[int]
    ) -> torch.dtype:
        """What a unit's gradients of dtype ``current`` have to become when ``gradients`` are added to them."""
        if self.rounds or current == torch.float32:
            return current
        # bf16 stays exact if nothing has to be added to it.
        is_exact = all(g.dtype == current and slot.index not in present for slot, g in gradients.items())
        return current if is_exact else torch.float32


@dataclass(frozen=True)
class Delivery:
    """Gradients of one unit that came together."""

    grads: UnitGrads
    slots: list[list[Slot]]
    """The slots whose gradients each tensor of the download holds, in order."""
    norms: Mapping[int, torch.Tensor]
    """Slot index -> 2-norm, of some of them."""


class Arrivals(DownloadRing[Delivery]):
    """Where gradients arrive, in the order in which they came: one copy for a unit and dtype.

    That they are added in this order, and when, is the business of whoever takes them.
    """

    def start_unit(
        self, grads: UnitGrads, gradients: Mapping[Slot, torch.Tensor], norms: Mapping[int, torch.Tensor]
    ) -> None:
        """Start to bring the unit's ``gradients``, which are the caller's own and in the order of their slots, and fit."""
        flats = {slot: in_memory_order(gradient, slot) for slot, gradient in gradients.items()}
        dtypes = dict.fromkeys(flat.dtype for flat in flats.values())
        slots = [[slot for slot, flat in flats.items() if flat.dtype == dtype] for dtype in dtypes]
        # Concatenated on the device: one copy to the host in place of one per parameter.
        sources = [torch.cat([flats[slot] for slot in each]) if len(each) > 1 else flats[each[0]] for each in slots]
        self.start(sources, Delivery(grads, slots, norms))

    def slots_of(self, grads: UnitGrads) -> set[int]:
        """Indices of slots of which a gradient is on its way."""
        deliveries = [download.purpose for download in self.coming]
        return {slot.index for each in deliveries if each.grads is grads for slots in each.slots for slot in slots}

    def pop_gradients(self) -> tuple[Delivery, dict[Slot, torch.Tensor]]:
        """Take the first ones out: with shape and strides of their parameters, until the next are started."""
        download = self.pop_first()
        landed: dict[Slot, torch.Tensor] = {}
        for slots, values in zip(download.purpose.slots, download.values, strict=True):
            for slot, part in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
                landed[slot] = part.as_strided(slot.spec.shape, slot.spec.stride, part.storage_offset())
        return download.purpose, landed

    def forget(self) -> None:
        """Drop all gradients that are on their way."""
        while self.coming:
            self.pop_first()
