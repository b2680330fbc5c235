"""Updates of this rank's shares in the last backward of a step, as their means come.

Knows which units this rank has left to that; must not know how means are computed, or what an update is.

[Note: updates of shares] As in one process, a unit may be updated when no backward needs its weights any more and all of its
gradients have come; here, on all ranks. A rank leaves a unit to that when both hold for itself, and its word is final: from then
on it counts as updated, so what is an error afterwards does not depend on which rank was faster. Ranks tell each other when they
average the unit (`infinity.gradients.gradient_exchange`), and update it if all have left the same gradients of it, with the same
hyperparameters. All else waits for the step, where differences are named.

Where ranks keep parts of the weights, too, none may fetch a unit while another writes to it. So a unit that is left to its update
is not fetched again. What is in memory of it goes at once or, where all units fit, stays, and gets what others have updated
when the step ends, if it is in the memory of all ranks. After the step's last update all ranks meet, see
[Note: changing divided weights] in ``infinity.tiers.weight_exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from infinity.gradients.sources import GradientSource
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class ShareUpdates:
    """Which units are left to their means, in the present step."""

    def __init__(self, let_go: Callable[[Unit], None], update: Callable[[Unit, GradientSource, float], None]) -> None:
        """
        Args:
            let_go: sees to it that nothing fetches the unit until the step is over.
            update: starts the update of this rank's share, by gradients of that loss scale.
        """
        self._let_go = let_go
        self.update = update
        self.digest = 0
        """Of the hyperparameters: from `begin` until `end`. 0: nothing is updated before the step."""
        self._left: dict[int, frozenset[int]] = {}
        """Unit index -> slot indices of its gradients."""

    def begin(self, digest: int) -> None:
        """The last backward of a step begins."""
        self.digest = digest
        self._left.clear()

    def end(self) -> None:
        """The step is over."""
        self.begin(0)

    def leave(self, unit: Unit, slots: Iterable[Slot]) -> None:
        """This rank has all gradients of the step for the unit: those of these parameters."""
        self._left[unit.index] = frozenset(slot.index for slot in slots)

    def word(self, unit: Unit, slots: frozenset[int]) -> int:
        """What all ranks must say alike of the unit; 0: it is not to be updated. ``slots``: of which gradients are there."""
        return self.digest if self._left.get(unit.index) == slots else 0

    def is_settled(self, unit: Unit, *, is_over: bool) -> bool:
        """Whether all ranks may hear of the unit: its weights are not fetched from then on, if it is one of those.

        ``is_over``: the backward has ended, so none needs them.
        """
        if unit.index not in self._left:
            return True
        is_settled = unit.settle() or is_over
        if is_settled:
            self._let_go(unit)
        return is_settled
