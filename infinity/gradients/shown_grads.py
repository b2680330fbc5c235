"""Main gradients that are looked at, replaced and set to zero.

Knows units and gradients; must not know parameters or when anybody looks.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from infinity.gradients.main_grads import MainGradStore
from infinity.gradients.sources import GradientBuffer
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class ShownGradients(MainGradStore):
    """`MainGradStore` for those who look. No update of the unit may be pending: it would still read what is changed here."""

    @property
    def dtype_shown(self) -> torch.dtype:
        """That of gradients that are looked at."""
        return self._waiting.dtype if self._waiting.rounds else torch.float32

    def is_at_hand(self, unit: Unit) -> bool:
        """Whether `show` has nothing to do."""
        buffer = self._buffers.get(unit.index)
        return (
            buffer is not None
            and unit.index in self._in_memory
            and buffer.dtype == self.dtype_shown
            and not self._zeros.get(unit.index)
            and (self.scaler.scale == 1.0 or unit.index in self._unscaled)
        )

    def show(self, unit: Unit) -> GradientBuffer:
        """The unit's gradients in memory, without the loss scale. `note_change` if they have been written to.

        They stay there until the next call for any unit: whoever wants to keep them has to `GradientBuffer.lend` them.
        """
        self._write_zeros(unit)
        if self.widen(unit):
            buffer = self._memory_of(unit)
        else:
            if unit.index not in self._sums:
                present = self._present.get(unit.index, set())
                self._sums[unit.index] = self._sum(unit, {}, present, is_wide=not self._waiting.rounds)
                self._unchanged.add(unit.index)
            buffer = self._sums[unit.index]
        if unit.index not in self._unscaled and self.scaler.scale != 1.0:
            for slot in self._present_slots(unit):
                buffer.view(slot).mul_(1.0 / self.scaler.scale)  # as torch.amp.GradScaler does
            self._unscaled.add(unit.index)
            self.note_change(unit)
        return buffer

    def note_change(self, unit: Unit) -> None:
        """What `show` gave has been changed, or will be."""
        self._unchanged.discard(unit.index)

    def scale_of(self, unit: Unit) -> float:
        """The factor that the unit's gradients have."""
        return 1.0 if unit.index in self._unscaled else self.scaler.scale

    def zero(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Gradients that are there become zero, but for those ``kept``: torch's ``zero_grad(set_to_none=False)``."""
        found = {
            unit.index: {slot.index for slot in self.slots_with_gradient(unit) if (unit.index, slot.index) not in kept}
            for unit in self._units
        }
        self.clear(kept)
        for index, slots in found.items():
            if slots:
                self._zeros.setdefault(index, set()).update(slots)

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Replace one parameter's main gradient by ``gradient``, which has no loss scale; None drops it."""
        present = self._present.setdefault(unit.index, set())
        if slot.index in present:
            self._listener().note_end(unit, [slot])
        if unit.index not in self._in_memory or self.scaler.scale != 1.0:
            self.show(unit)
            self.note_change(unit)
        present.discard(slot.index)
        if unit.index in self._zeros:
            self._zeros[unit.index].discard(slot.index)
        if gradient is not None:
            self._add(unit, {slot: gradient})
