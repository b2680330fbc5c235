"""Whether steps go vertically: what that saves, before the first step, and what happened in those that were made.

Pure arithmetic on predictions, and counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from infinity.planning.cost_model import best_placement, predict
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import Placement, place

logger = logging.getLogger(__name__)

_ACTIVATIONS_SHARE = {"memory": 4, "cpu": 2, "nvme": 4}
"""One part in so many of what the budget leaves is for units' inputs, or for all that waits for backward."""
_LEAST_SAVED_SHARE = 0.1
"""Less of a step's bytes than this is not worth computing everything once more."""


_FREE_FAILURES = 2
_SUCCESSES_PER_FAILURE = 10


class Suitability:
    """Counts steps that went vertically and steps that did not. A failure costs a forward: too many, and it is over."""

    def __init__(self, asked: str, reason_against: str | None) -> None:
        """
        Args:
            asked: the config's ``infinity.schedule``.
            reason_against: why it makes no sense for this model and this config, whatever happens; None if it does.
        """
        self.is_asked = asked == "vertical"
        """Whether the config asks for it, and not only allows it."""
        self.reason_against = "the config asks for it" if asked == "ordinary" else reason_against
        """Why no step goes vertically any more; None while they do."""
        self._num_failures = 0
        self._num_successes = 0
        self._said: set[str] = set()
        self._failed_last = False

    @property
    def is_expected(self) -> bool:
        """Whether steps go vertically as far as the config tells: it asks for that, and nothing is against it."""
        return self.is_asked and self.reason_against is None

    @property
    def is_proven(self) -> bool:
        """Whether the last step went vertically, under close watch or after one that did, so that the next one needs less."""
        return self._num_successes > 0 and not self._failed_last

    def note_success(self) -> None:
        """A step went vertically."""
        self._num_successes += 1
        self._failed_last = False

    def note_failure(self, reason: str, *, is_final: bool = False) -> None:
        """A step had to be begun anew in the ordinary order; ``is_final``: so would be all that come."""
        self._failed_last = True
        self._num_failures += 1
        if is_final or self._num_failures > _FREE_FAILURES + self._num_successes // _SUCCESSES_PER_FAILURE:
            self.reason_against = reason
        self.say(reason)

    def say(self, reason: str) -> None:
        """Log, once, why a step is done in the ordinary order."""
        if reason not in self._said:
            self._said.add(reason)
            level = logging.WARNING if self.is_asked else logging.INFO
            logger.log(level, "a step is done in the ordinary order: %s", reason)

    def note_difference(self, what: str) -> bool:
        """Bits of a vertical step differ by this. Returns whether that is to be: the config asks for such steps; it is logged."""
        if self.is_asked and what not in self._said:
            self._said.add(what)
            logger.warning("the vertical schedule differs in bits from one micro-batch after the other: %s", what)
        return self.is_asked

    def forgive(self) -> None:
        """The last failure, if the last step was one, does not count: the ordinary order failed as well."""
        if self._failed_last:
            self._failed_last = False
            self._num_failures -= 1
            self.reason_against = None


def place_for_schedule(
    asked: str, units: Sequence[UnitSize], request: Request, order: Sequence[int]
) -> tuple[Placement, Suitability]:
    """The placement, with room for activations if they may be spilled, and whether they may.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request: see `infinity.planning.placement.place`.
        order: in which one micro-batch is expected to touch its units.

    Raises:
        BudgetTooSmallError, ConfigValueError: see `infinity.planning.placement.place`.
    """
    if asked == "ordinary" or (asked == "auto" and request.num_micro_batches == 1):
        return _for_ordinary_steps(units, request, order), Suitability(asked, "a step has one micro-batch")
    # Gradients take what they take with one micro-batch: they are summed before they go anywhere.
    placement = _with_activations(units, replace(request, num_micro_batches=1), order)
    reason = reason_against(asked, units, request, placement, order)
    if reason is not None:
        placement = _for_ordinary_steps(units, request, order)
    return placement, Suitability(asked, reason)


def _for_ordinary_steps(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    if request.activations != "memory":
        return _with_activations(units, request, order)
    return best_placement(units, request, order, len(units))


def _with_activations(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    activations = 0
    if request.shares_host_memory or request.activations == "cpu":
        left = request.budget_bytes - place(units, request).minimum_bytes
        activations = left // _ACTIVATIONS_SHARE[request.activations]
    smaller = replace(request, budget_bytes=request.budget_bytes - activations)
    return replace(best_placement(units, smaller, order, len(units)), activation_bytes=activations)


def reason_against(
    asked: str, units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int]
) -> str | None:
    """Why steps had better go in the ordinary order; None if the vertical one is worth it.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request, placement: see `infinity.planning.placement`.
        order: in which one micro-batch is expected to touch its units.
    """
    if asked == "vertical":
        return None
    ordinary = predict(units, request, placement, order, len(units))
    vertical = predict(units, replace(request, num_micro_batches=1), placement, order, len(units))
    before = ordinary.read_bytes + ordinary.write_bytes
    saved = before - vertical.read_bytes - vertical.write_bytes
    if saved < _LEAST_SAVED_SHARE * before or saved == 0:
        return "it would save hardly any bytes: weights and gradients stay in memory"
    return None
