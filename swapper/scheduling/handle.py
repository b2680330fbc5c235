"""The handle that a read or a write returns (a future): waits for its end, and raises its error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from swapper.backend import Direction
from swapper.config import Priority, as_priority
from swapper.errors import SwapperError
from swapper.extents.extent import Extent
from swapper.sync import interrupts
from swapper.sync.callbacks import log_raised
from swapper.uncopyable import Uncopyable


class OperationState(Enum):
    """Where an operation is. The comments say who owns it, and with it the buffer."""

    BLOCKED = "blocked"  # earlier operations on the same bytes
    QUEUED = "queued"  # the queue: ready, at least one transfer is not handed over yet
    RUNNING = "running"  # the backend: every transfer is handed over
    STALLED = "stalled"  # nobody waits any more, but the backend still has the buffer
    DONE = "done"  # nobody: the buffer is the user's again


class Handle(Uncopyable):
    """One read or write of ``num_bytes`` of an ``extent``, with its present ``priority``.

    It keeps its buffer alive until the request is over. Thread safe.
    """

    # The instances are `Operation`s: handle, scheduler's record and backend's request in one object, which is cheaper
    # to make than three.
    extent: Extent
    num_bytes: int
    priority: Priority
    direction: Direction
    scheduler: Any
    state: OperationState
    is_finished: bool
    is_observed: bool
    failure: SwapperError | None
    waiters: Sequence[threading.Lock]
    callbacks: list[Callable[[Any], None]]

    def __repr__(self) -> str:
        state = self.state.value if self.failure is None else f"failed: {self.failure}"
        what = f"{self.direction.name.lower()} of {self.num_bytes} bytes of {self.extent.name!r}"
        return f"Handle({what}, {state})"

    @property
    def is_read(self) -> bool:
        """Whether bytes go from the extent into memory."""
        return self.direction is Direction.READ

    @property
    def error(self) -> SwapperError | None:
        """Why the request failed; ``None`` while it runs or if it succeeded. Reading it counts as having seen it."""
        if not self.is_finished:
            return None
        observe(self)
        return self.failure

    def done(self) -> bool:
        """Return whether the request is over, with or without an error."""
        return self.is_finished

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the request is over; a request somebody waits for has the highest priority.

        Args:
            timeout_seconds: How long to wait at most. By default, until the swapper completed no transfer at all for
                ``deadline_seconds``.

        Raises:
            SwapperError: What the request failed with.
            StallError: It was not over in time; it still runs, and may be waited for again.
        """
        if not self.is_finished:
            # Without the scheduler's lock: a state that changes now costs at most a promotion without effect.
            if self.priority > Priority.DEMAND and self.state is not OperationState.RUNNING:
                self.scheduler.promote(self, Priority.DEMAND)
            self.scheduler.sleep(self, timeout_seconds, observes=True)
        if self.failure is not None:
            observe(self)
            # Each waiter raises the same object: with its traceback, it would keep the frames of all of them.
            raise self.failure.with_traceback(None)

    def promote(self, priority: Priority = Priority.DEMAND) -> None:
        """Raise the priority of the request and of the earlier requests it waits for; never lowers one."""
        self.scheduler.promote(self, as_priority(priority))

    def add_done_callback(self, function: Callable[[Handle], None]) -> None:
        """Call ``function(handle)`` once when the request is over, or now if it is.

        It runs on a backend thread: it must be quick and must not wait for I/O. What it raises is only logged. A thread
        in :meth:`wait` may return before it has run.
        """
        if interrupts.pid != self.scheduler.pid:
            self.scheduler.check_process()
        # The class has one empty list for all operations: the first callback gives this one a list of its own. No lock:
        # setdefault, append and the pop in announce() are single steps under the interpreter's lock.
        self.__dict__.setdefault("callbacks", []).append(function)
        if self.is_finished:  # announce() may have run before the append
            announce((self,))


def observe(operation: Handle) -> SwapperError | None:
    """Return the error of a finished operation if nobody has seen it, and mark it as seen."""
    if operation.is_observed or not operation.is_finished:
        return None
    operation.is_observed = operation.failure is not None
    return operation.failure


def announce(over: Iterable[Handle]) -> None:
    """Wake threads that wait for these finished operations, and run their callbacks. Without the scheduler's lock."""
    # Several threads may do so at once: each callback is run by the one that pops it.
    for operation in over:
        for waiter in operation.waiters:
            waiter.release()  # IOScheduler.sleep() blocks in its acquire
        operation.waiters = ()
        while operation.callbacks:
            try:
                function = operation.callbacks.pop(0)
            except IndexError:  # another thread was faster
                break
            try:
                function(operation)
            except BaseException as error:
                log_raised(error, "a callback of a finished read or write")
