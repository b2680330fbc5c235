"""The main gradients of one unit: which memory they are in, and what of them is spilled.

Knows one unit's slots and buffer; must not know pools, drives, updates or other units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from infinity.gradients.sources import GradientBuffer
from infinity.state_machine import moves
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from swapper import Extent


class GradState(Enum):
    """Who holds memory for a unit's main gradients, of which there may be none."""

    AT_REST = auto()
    """Nobody: what there is, is spilled. Next: memory is taken, for good if the unit is one of those that stay in RAM."""
    KEPT = auto()
    """The unit, for good; nothing is spilled. An update may still read what it has used up. Next: the memory is handed to an
    update, or to the user who holds tensors over it; or what is in it becomes wider than there is room for, and is spilled."""
    SUMMED = auto()
    """The unit, for as long as there is room. What is spilled is out of date. Next: the sum is spilled, or handed over."""
    SHOWN = auto()
    """The unit, for as long as there is room. What is spilled is the same. Next: it is changed, or its memory given back."""


GRAD_MOVES: Mapping[str, Mapping[GradState, GradState]] = {
    "keep": {GradState.AT_REST: GradState.KEPT, GradState.KEPT: GradState.KEPT},
    "sum_in": {GradState.AT_REST: GradState.SUMMED},
    "show_in": {GradState.AT_REST: GradState.SHOWN},
    "note_change": {**{state: state for state in GradState}, GradState.SHOWN: GradState.SUMMED},
    "take": {state: GradState.AT_REST for state in GradState if state is not GradState.AT_REST},
    "leave": {GradState.KEPT: GradState.AT_REST},
}
"""Method of `UnitGrads` -> state before -> state after. See [Note: debug mode] in ``infinity.state_machine``."""


@dataclass(slots=True, eq=False)
class UnitGrads:
    """What is known of one unit's main gradients. Touched under the engine lock only."""

    unit: Unit
    """Whose, for good."""
    stays: bool
    """Whether they stay in RAM: as the plan says, until `leave`."""
    buffer: GradientBuffer | None = None
    """Their memory: from `keep`, `sum_in` or `show_in` until `take` or `leave`."""
    is_unchanged: bool = False
    """Whether what is spilled is the same as what is in `buffer`: from `show_in` until `note_change`, or the buffer's end."""
    number: int = 0
    """Counts the buffers of all units that were taken for a time: the smallest number was taken first."""
    extent: Extent | None = None
    """Where they are spilled: from the first time on, for good."""
    spilled_dtype: torch.dtype | None = None
    """As what: from each time they are spilled until they are used up."""
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

    @property
    def state(self) -> GradState:
        """Who holds memory, as the fields tell."""
        if self.buffer is None:
            return GradState.AT_REST
        if self.stays:
            return GradState.KEPT
        return GradState.SHOWN if self.is_unchanged else GradState.SUMMED

    def slots(self) -> list[Slot]:
        """The parameters that have a gradient in memory or on NVMe."""
        return [slot for slot in self.unit.layout.slots if slot.index in self.present]

    @moves(GRAD_MOVES)
    def keep(self, buffer: GradientBuffer) -> None:
        """``buffer`` is the unit's memory from now on, instead of the one it has, if any."""
        self.buffer = buffer

    @moves(GRAD_MOVES)
    def sum_in(self, buffer: GradientBuffer, number: int) -> None:
        """Gradients are added up in ``buffer``, which holds what was spilled."""
        self.buffer, self.number = buffer, number

    @moves(GRAD_MOVES)
    def show_in(self, buffer: GradientBuffer, number: int) -> None:
        """Gradients are looked at in ``buffer``, which holds what is spilled."""
        self.buffer, self.number, self.is_unchanged = buffer, number, True

    @moves(GRAD_MOVES)
    def note_change(self) -> None:
        """What is in memory is not what is spilled, or will not be."""
        self.is_unchanged = False
        self.norms.clear()

    @moves(GRAD_MOVES)
    def take(self) -> GradientBuffer:
        """The unit's memory, which is the caller's from now on."""
        if self.buffer is None:
            raise RuntimeError(f"the gradients of unit {self.unit.name} are in no memory")
        buffer, self.buffer, self.is_unchanged = self.buffer, None, False
        return buffer

    @moves(GRAD_MOVES)
    def leave(self) -> None:
        """The gradients have been spilled, and stay in RAM no longer. Their memory is the caller's from now on."""
        self.stays, self.buffer = False, None

    def note_norms(
        self, norms: Mapping[int, torch.Tensor], gradients: Mapping[Slot, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """Gradients were added, so what was known is over; their own ``norms`` count where nothing was there before, or is
        lost in ``dtype``."""
        for slot, gradient in gradients.items():
            self.norms.pop(slot.index, None)
            is_exact = dtype in (torch.float32, gradient.dtype)
            if is_exact and slot.index in norms and slot.index not in self.present:
                self.norms[slot.index] = norms[slot.index]

    def drop(self, slots: set[int]) -> None:
        """These slots' gradients are used up, or not wanted. What is known of all of them ends with the last one."""
        self.present -= slots
        self.zeros -= slots
        for index in slots:
            self.norms.pop(index, None)
        if not self.present and not self.zeros:
            self.spilled_dtype, self.is_unscaled = None, False
