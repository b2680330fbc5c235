"""Whether the next step goes vertically, from what is asked for and what happened so far."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

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
        self._asked = asked
        self._against = reason_against
        self._num_failures = 0
        self._num_successes = 0
        self._said: set[str] = set()
        self._failed_last = False
        if asked == "ordinary":
            self._against = "the config asks for it"

    @property
    def reason_against(self) -> str | None:
        """Why no step goes vertically any more; None while they do."""
        return self._against

    @property
    def is_expected(self) -> bool:
        """Whether steps go vertically as far as the config tells: it asks for that, and nothing is against it."""
        return self._asked == "vertical" and self._against is None

    @property
    def is_proven(self) -> bool:
        """Whether the last step went vertically, under close watch or after one that did, so that the next one needs less."""
        return self._num_successes > 0 and not self._failed_last

    def note_success(self) -> None:
        """A step went vertically."""
        self._num_successes += 1
        self._failed_last = False

    def note_failure(self, reason: str) -> None:
        """A step had to be begun anew in the ordinary order."""
        self._failed_last = True
        self._num_failures += 1
        if self._num_failures > _FREE_FAILURES + self._num_successes // _SUCCESSES_PER_FAILURE:
            self._against = reason
        if reason not in self._said:
            self._said.add(reason)
            level = logging.WARNING if self._asked == "vertical" else logging.INFO
            logger.log(level, "a step is done in the ordinary order: %s", reason)

    def forgive(self) -> None:
        """The last failure, if the last step was one, does not count: the ordinary order failed as well."""
        if self._failed_last:
            self._failed_last = False
            self._num_failures -= 1
            self._against = None
