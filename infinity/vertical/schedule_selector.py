"""Whether steps go on vertically, by what happened in those that were made."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_FREE_FAILURES = 2
_SUCCESSES_PER_FAILURE = 10


class ScheduleSelector:
    """Counts steps that went vertically and steps that did not. A failure costs a forward: too many, and it is over."""

    def __init__(self, asked: str, reason_against: str | None) -> None:
        """
        Args:
            asked: the config's ``infinity.schedule``.
            reason_against: see `infinity.plan.cost_model.place_for_schedule`.
        """
        self.is_asked = asked == "vertical"
        """Whether the config asks for it, and not only allows it."""
        self.reason_against = reason_against
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

    def on_success(self) -> None:
        """A step went vertically."""
        self._num_successes += 1
        self._failed_last = False

    def on_failure(self, reason: str, *, is_final: bool = False) -> None:
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

    def on_difference(self, what: str) -> bool:
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
