"""Who wants to know how operations ended: threads that wait, callbacks, and whoever calls next."""

from __future__ import annotations

import contextlib
from collections import deque

from swapper.errors import SwapperError
from swapper.scheduling.handle import observe
from swapper.scheduling.operation import Operation

TICKS_PER_DEADLINE = 16
"""What has lasted for so many ticks of the watchdog is late. Counting ticks instead of reading a clock makes a stopped process
(SIGSTOP, a debugger) lose no time: the watchdog stands still with it."""


def tick_seconds(deadline_seconds: float) -> float:
    """Return the time between two ticks: a little less than a whole part of the deadline.

    So ``TICKS_PER_DEADLINE`` ticks after any moment, between 7/8 of the deadline and all of it has passed, with some
    time in hand for a watchdog that wakes up late.
    """
    return deadline_seconds / (TICKS_PER_DEADLINE + 0.5)


class PendingErrors:
    """Failed operations in the order of their failure, until somebody has seen each error once. Thread safe."""

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()

    def add(self, operation: Operation) -> None:
        """Remember an operation that has failed, unless somebody has seen its error or waits and will."""
        if not operation.is_observed and not operation.num_observers:
            self.operations.append(operation)

    def pop(self) -> SwapperError | None:
        """Return the first error that nobody has seen; from now on it is seen."""
        with contextlib.suppress(IndexError):
            while True:
                error = observe(self.operations.popleft())
                if error is not None:
                    return error
        return None

    def raise_first(self) -> None:
        """Raise the first error that nobody has seen."""
        error = self.pop()
        if error is not None:
            raise error.with_traceback(None)
