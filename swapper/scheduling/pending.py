"""Errors of reads and writes that nobody has seen yet."""

from __future__ import annotations

from collections import deque

from swapper.errors import SwapperError
from swapper.scheduling.operation import Operation


class PendingErrors:
    """Knows failed operations in the order of their failure, until somebody has seen each error once. Thread safe."""

    def __init__(self) -> None:
        self._operations: deque[Operation] = deque()

    def add(self, operation: Operation) -> None:
        """Remember an operation that has failed, unless somebody has seen its error or waits and will."""
        if not operation.is_observed and not operation.num_observers:
            self._operations.append(operation)

    def take(self) -> SwapperError | None:
        """Return the first error that nobody has seen; from now on it is seen."""
        while self._operations:
            try:
                operation = self._operations.popleft()
            except IndexError:  # another thread was faster
                return None
            error = observe(operation)
            if error is not None:
                return error
        return None

    def raise_first(self) -> None:
        """Raise the first error that nobody has seen."""
        if self._operations:
            error = self.take()
            if error is not None:
                raise error.with_traceback(None)


def observe(operation: Operation) -> SwapperError | None:
    """Return the error of a finished operation if nobody has seen it; from now on it is seen."""
    if operation.is_observed or not operation.is_finished:
        return None
    operation.is_observed = operation.error is not None
    return operation.error
