"""Decides whether to go on with vertical steps, from how many have failed."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# A vertical step that fails has computed its forward for nothing. Two failures are always allowed, since a model may
# change a buffer in its first steps only (a rotary table that grows), and one more for every ten successes.
_FREE_FAILURES = 2
_SUCCESSES_PER_FAILURE = 10


class ScheduleSelector:
    """Counts vertical steps and failures. With too many failures, all later steps go in the ordinary order."""

    def __init__(self, asked: str, reason_against: str | None) -> None:
        """
        Args:
            asked: the config's ``infinity.schedule``.
            reason_against: see `infinity.plan.cost_model.place_for_schedule`.
        """
        self.is_asked = asked == "vertical"
        """Whether the config says "vertical", and not only "auto"."""
        self.reason_against = reason_against
        """Why no step goes vertically any more; None while steps may."""
        self._num_failures = 0
        self._num_successes = 0
        self._said: set[str] = set()
        self._failed_last = False

    @property
    def is_expected(self) -> bool:
        """Whether the first step is planned as a vertical one."""
        return self.is_asked and self.reason_against is None

    @property
    def is_proven(self) -> bool:
        """Whether the last step went vertically. Otherwise the next one is a trial, with all checks."""
        return self._num_successes > 0 and not self._failed_last

    def on_success(self) -> None:
        """Count a step that went vertically."""
        self._num_successes += 1
        self._failed_last = False

    def on_failure(self, reason: str, *, is_final: bool = False) -> None:
        """Count a step that had to be repeated in the ordinary order; ``is_final``: all later ones would fail as
        well."""
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
            logger.log(level, "a step runs in the ordinary order, one micro-batch after the other: %s", reason)

    def on_difference(self, what: str) -> bool:
        """Whether to go on although ``what`` changes bits: only if the config asks for vertical steps. It is logged
        once."""
        if self.is_asked and what not in self._said:
            self._said.add(what)
            logger.warning(
                "with the vertical schedule, bits differ from those of one micro-batch after the other: %s", what
            )
        return self.is_asked

    def forgive(self) -> None:
        """Do not count the last failure, because the model fails in the ordinary order as well."""
        if self._failed_last:
            self._failed_last = False
            self._num_failures -= 1
            self.reason_against = None
