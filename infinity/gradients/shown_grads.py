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
        grads = self._grads[unit.index]
        return (
            grads.stays
            and not self._arrivals.slots_of(grads)
            and grads.buffer is not None
            and grads.buffer.dtype == self.dtype_shown
            and not grads.zeros
            and (self.scaler.scale == 1.0 or grads.is_unscaled)
        )

    def show(self, unit: Unit) -> GradientBuffer:
        """The unit's gradients in memory, without the loss scale. `note_change` if they have been written to.

        They stay there until the next call for any unit: whoever wants to keep them has to `GradientBuffer.lend` them.
        """
        grads, buffer = self._of(unit), self.open(unit)
        if not grads.is_unscaled and self.scaler.scale != 1.0:
            for slot in grads.slots():
                buffer.view(slot).mul_(1.0 / self.scaler.scale)  # as torch.amp.GradScaler does
            grads.is_unscaled = True
            grads.note_change()
        return buffer

    def open(self, unit: Unit) -> GradientBuffer:
        """As `show`, with the loss scale if they have it."""
        grads = self._of(unit)
        self._write_zeros(grads)
        if not self.widen(unit) and grads.buffer is None:
            grads.show_in(self._sum(grads, {}, is_wide=not self._waiting.rounds), next(self._numbers))
        if grads.stays:
            grads.norms.clear()  # whoever looks may write
        return self._memory_of(grads)

    def note_change(self, unit: Unit) -> None:
        """What `show` gave has been changed, or will be."""
        self._of(unit).note_change()

    def scale_of(self, unit: Unit) -> float:
        """The factor that the unit's gradients have."""
        return 1.0 if self._of(unit).is_unscaled else self.scaler.scale

    def zero(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Gradients that are there become zero, but for those ``kept``: torch's ``zero_grad(set_to_none=False)``."""
        self._land()
        found = [grads.present | grads.zeros for grads in self._grads]
        self.clear(kept)
        for grads, slots in zip(self._grads, found, strict=True):
            grads.zeros |= slots - grads.present

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Replace one parameter's main gradient by ``gradient``, which has no loss scale; None drops it."""
        grads = self._of(unit)
        if slot.index in grads.present:
            self.held.end(unit, [slot])
        if not grads.stays or self.scaler.scale != 1.0:
            self.show(unit)
            grads.note_change()
        grads.present.discard(slot.index)
        grads.zeros.discard(slot.index)
        if gradient is not None:
            self._land()  # one on a GPU comes block by block, for it is the user's
            self._add(grads, {slot: gradient})
