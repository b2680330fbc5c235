"""Ticks of the watchdog, and errors that nobody has waited for."""

from __future__ import annotations

import contextlib
from collections import deque

from swapper.errors import SwapperError
from swapper.scheduling.handle import observe
from swapper.scheduling.operation import Operation

# A transfer is late after so many ticks of the watchdog. A clock would go on in a stopped process (SIGSTOP, a
# debugger), and its transfers would all be late when it continues. The watchdog stops together with the process.
TICKS_PER_DEADLINE = 16


def tick_seconds(deadline_seconds: float) -> float:
    """Return the time between two ticks of the watchdog."""
    # 120 s: a tick is 7.27 s. The 16th tick after a moment comes 15 to 16 intervals later, after 109 to 116 s. So at
    # least 7/8 of the deadline (105 s) has passed, and a watchdog that wakes up late is still within it.
    return deadline_seconds / (TICKS_PER_DEADLINE + 0.5)


class PendingErrors:
    """Failed operations in the order of their failure, until their errors are seen. Thread safe."""

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()

    def add(self, operation: Operation) -> None:
        """Remember a failed operation, unless somebody has seen its error or waits for it."""
        if not operation.is_observed and not operation.num_observers:
            self.operations.append(operation)

    def pop(self) -> SwapperError | None:
        """Return the first error that nobody has seen, and mark it as seen."""
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
