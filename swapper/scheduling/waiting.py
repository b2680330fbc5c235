"""What waits: threads for an operation, errors for somebody who sees them, the watchdog for its next tick."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from swapper.errors import SwapperError
from swapper.scheduling.operation import Operation, observe
from swapper.sync.bell import Bell
from swapper.sync.callbacks import call_back
from swapper.sync.limits import wait_in_parts

# 1, 2, 4, ... ms: the 8 attempts of the default max_retries wait 255 ms in all.
_FIRST_DELAY_SECONDS = 0.001
_MOST_DELAY_SECONDS = 0.25

# A transfer is late after so many ticks of the watchdog. A clock would go on in a stopped process (SIGSTOP, a
# debugger), and its transfers would all be late when it continues. The watchdog stops together with the process.
TICKS_PER_DEADLINE = 16


def tick_seconds(deadline_seconds: float) -> float:
    """Return the time between two ticks of the watchdog."""
    # 120 s: a tick is 7.27 s. The 16th tick after a moment comes 15 to 16 intervals later, after 109 to 116 s. So at
    # least 7/8 of the deadline (105 s) has passed, and a watchdog that wakes up late is still within it.
    return deadline_seconds / (TICKS_PER_DEADLINE + 0.5)


class _Thread(threading.local):
    waiter: threading.Lock | None = None  # taken, and free to sleep on: see `sleep`


_thread = _Thread()


def sleep(operation: Operation, timeout_seconds: float | None, *, observes: bool) -> bool:
    """Block until an operation is over; return whether it is.

    Args:
        operation: What to wait for.
        timeout_seconds: How long at most; by default, until nothing has completed for the deadline.
        observes: The caller will raise the operation's error. It is kept as pending if this wait is cut off.
    """
    scheduler = operation.scheduler
    # A bare lock is the cheapest thing that one thread can sleep on and another can wake. A thread keeps its own, but a
    # signal handler that waits meanwhile makes another one.
    waiter, _thread.waiter = _thread.waiter, None
    if waiter is None:
        waiter = threading.Lock()
        waiter.acquire()
    wake: Any = waiter.__exit__  # releases it, whatever the argument is: a callback that is no function of Python
    is_woken = is_over = False
    try:
        # First among the callbacks, then a look: see `Handle.add_done_callback`.
        if observes:
            operation.__dict__.setdefault("observers", []).append(wake)
        operation.callbacks.insert(0, wake)
        if operation.is_finished:
            pass
        elif timeout_seconds is not None:
            is_woken = wait_in_parts(lambda seconds: waiter.acquire(timeout=seconds), timeout_seconds)
        else:
            # Longer than the watchdog takes: it knows which transfer hangs, and ends this wait with that error.
            num_idle, num_completed = 0, -1
            while num_idle <= TICKS_PER_DEADLINE + 2:
                is_woken = waiter.acquire(timeout=scheduler.tick_seconds)
                if is_woken or operation.done():
                    break
                before = num_completed
                num_completed = sum(queue.num_taken - len(queue.inflight) for queue in scheduler.queues)
                # A long queue on a slow drive is no stall: any completed transfer restarts the count.
                num_idle = num_idle + 1 if num_completed == before else 1
        is_over = is_woken or operation.done()
    finally:
        if is_woken:  # else `wake` may still come
            _thread.waiter = waiter
        if not is_over:
            for functions in (operation.observers, operation.callbacks):
                try:  # noqa: SIM105 (`suppress` is Python: an interrupt in it would leave `wake` there)
                    functions.remove(wake)
                except ValueError:
                    pass
            if observes and operation.done() and operation.failure is not None:
                scheduler.pending.add(operation)  # it failed when the only one who wanted to know had gone
    return is_over


def watch(on_tick: weakref.WeakMethod[Callable[[], None]], stop: Bell, seconds: float) -> None:
    """Call a scheduler's method at each tick, until the scheduler is gone or ``stop`` rings."""
    # A weak reference: this thread must not keep alive a scheduler that nobody closed.
    while not stop.wait(seconds):
        function = on_tick()
        if function is None:
            return
        call_back(function, "looking for transfers that hang")
        del function  # else the scheduler would live until the next tick


def delay_seconds(num_retries: int, *, has_moved: bool) -> float:
    """Return the pause before the ``num_retries``-th retry of a transfer."""
    # Bytes have moved: a signal, or the end of a file system's extent, made the transfer short. No pause helps there.
    # min(..., 16): a large max_retries would make 2.0 ** 1024, which raises OverflowError.
    return 0.0 if has_moved else min(_FIRST_DELAY_SECONDS * 2.0 ** min(num_retries - 1, 16), _MOST_DELAY_SECONDS)


class PendingErrors:
    """Failed operations in the order of their failure, until their errors are seen. Thread safe."""

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()

    def add(self, operation: Operation) -> None:
        """Remember a failed operation, unless somebody has seen its error or waits for it."""
        if not operation.is_observed and not operation.observers:
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
