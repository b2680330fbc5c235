"""Blocking until an operation is over, but never for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from swapper.backend import IOBackend
from swapper.config import bounded_seconds
from swapper.scheduling.failure import stall_error
from swapper.scheduling.operation import Operation
from swapper.scheduling.pending import PendingErrors
from swapper.scheduling.watchdog import TICKS_PER_DEADLINE, tick_seconds
from swapper.sync.callbacks import call_back
from swapper.sync.patience import wait_in_parts
from swapper.sync.reentry import refuse_owned


class WaitingRoom:
    """Knows how to wait for operations and when to give up; must not know what makes them end.

    Args:
        lock: The scheduler's; guards the operations.
        pending: Gets the error of an operation whose waiter went away.
        backend: Says in which file something hangs.
        deadline_seconds: A wait ends when nothing at all has completed for so long.
        num_completed: Counts the transfers that have completed.
    """

    def __init__(
        self,
        lock: threading.RLock,
        pending: PendingErrors,
        backend: IOBackend,
        deadline_seconds: float,
        num_completed: Callable[[], int],
    ) -> None:
        self._lock = lock
        self._pending = pending
        self._backend = backend
        self._deadline_seconds = deadline_seconds
        self._num_completed = num_completed

    def wait(self, operation: Operation, timeout_seconds: float | None = None, *, observes: bool) -> None:
        """Block until the operation is over.

        Args:
            operation: What to wait for.
            timeout_seconds: How long at most; by default, until nothing has completed for the deadline.
            observes: The caller will see to the operation's error, so that it need not be remembered.

        Raises:
            StallError: It is not over.
            ReentryError: A signal handler or finalizer waits, in the midst of a change that has to go on first.
        """
        refuse_owned(self._lock, "waiting")
        left_seconds = None if timeout_seconds is None else bounded_seconds(timeout_seconds)
        # A bare lock is the cheapest thing that one thread can sleep on and another can wake.
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if _is_over(operation):
                return
            operation.waiters.append(waiter)
            operation.num_observers += observes
        is_woken = False
        try:
            is_woken = self._sleep(operation, waiter, left_seconds)
        finally:
            with self._lock:
                operation.num_observers -= observes
                if waiter in operation.waiters:
                    operation.waiters.remove(waiter)
                if observes and not is_woken and _is_over(operation) and operation.error is not None:
                    self._pending.add(operation)  # it failed when the only one who wanted to know had gone
        if not is_woken and not _is_over(operation):
            limit = self._deadline_seconds if timeout_seconds is None else timeout_seconds
            detail = f"is not over after a wait of {limit:g} seconds ({operation.state.value})"
            raise stall_error(operation, None, self._backend, detail)

    def _sleep(self, operation: Operation, waiter: threading.Lock, timeout_seconds: float | None) -> bool:
        if timeout_seconds is not None:
            return wait_in_parts(lambda seconds: waiter.acquire(timeout=seconds), timeout_seconds)
        # One tick longer than the watchdog takes: it knows which transfer hangs, and ends this wait with that error.
        num_idle = 0
        while num_idle < TICKS_PER_DEADLINE + 1:
            num_completed = self._num_completed()
            if waiter.acquire(timeout=tick_seconds(self._deadline_seconds)) or _is_over(operation):
                return True
            num_idle = num_idle + 1 if num_completed == self._num_completed() else 0
        return False

    def wait_for_all(self, operations: Iterable[Operation]) -> None:
        """Block until all of them are over; their errors are left for whoever asks next."""
        for operation in reversed([*operations]):  # when the last is over, the others are, as a rule
            if not operation.is_finished:
                self.wait(operation, observes=False)


def _is_over(operation: Operation) -> bool:
    # A call, because other threads change the attribute: a type checker would take its first value for the last.
    return operation.is_finished


def announce(over: Iterable[Operation]) -> None:
    """Wake who waits for these operations and call back who asked for it; not under the lock."""
    for operation in over:
        for waiter in operation.waiters:
            waiter.release()
        operation.waiters.clear()
        if operation.callbacks:
            announce_callbacks(operation)


def announce_callbacks(operation: Operation) -> None:
    """Call back who asked for it. From any thread, each of which takes one after the other out of the list."""
    while operation.callbacks:
        with contextlib.suppress(IndexError):  # another thread was faster
            call_back(operation.callbacks.pop(0), "a callback of a finished read or write")
