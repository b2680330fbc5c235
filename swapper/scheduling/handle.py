"""What a read or a write returns: the only way to learn that it is over, and how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable

from swapper.backend import Direction
from swapper.config import Priority, as_priority
from swapper.errors import SwapperError
from swapper.extents.extent import Extent
from swapper.scheduling.operation import Operation
from swapper.scheduling.scheduler import IOScheduler
from swapper.scheduling.waiting import announce_callbacks, observe
from swapper.uncopyable import Uncopyable


class Handle(Uncopyable):
    """Knows one read or write; keeps its buffer alive until the request is over. Thread safe."""

    __slots__ = ("_operation", "_scheduler")

    def __init__(self, operation: Operation, scheduler: IOScheduler) -> None:
        self._operation = operation
        self._scheduler = scheduler

    def __repr__(self) -> str:
        operation = self._operation
        state = operation.state.value if operation.error is None else f"failed: {operation.error}"
        what = f"{operation.direction.name.lower()} of {operation.num_bytes} bytes of {operation.extent.name!r}"
        return f"Handle({what}, {state})"

    @property
    def extent(self) -> Extent:
        """The extent that is read or written."""
        return self._operation.extent

    @property
    def num_bytes(self) -> int:
        """Length of the request."""
        return self._operation.num_bytes

    @property
    def is_read(self) -> bool:
        """Whether bytes go from the extent into memory."""
        return self._operation.direction is Direction.READ

    @property
    def priority(self) -> Priority:
        """The priority it has now."""
        return self._operation.priority

    @property
    def error(self) -> SwapperError | None:
        """Why the request failed; ``None`` while it runs or if it succeeded. Reading an error counts as having seen
        it."""
        if not self._operation.is_finished:
            return None
        observe(self._operation)
        return self._operation.error

    def done(self) -> bool:
        """Return whether the request is over, well or badly."""
        return self._operation.is_finished

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the request is over; a request somebody waits for has the highest priority.

        Args:
            timeout_seconds: How long to wait at most. By default, until the swapper completed no transfer at all for
                ``deadline_seconds``.

        Raises:
            SwapperError: What the request failed with.
            StallError: It was not over in time; it still runs, and may be waited for again.
        """
        operation = self._operation
        if not operation.is_finished or operation.error is not None:
            self._scheduler.wait(operation, timeout_seconds)

    def promote(self, priority: Priority = Priority.DEMAND) -> None:
        """Raise the priority of the request and of the earlier requests it waits for; never lowers one."""
        self._scheduler.promote(self._operation, as_priority(priority))

    def add_done_callback(self, function: Callable[[Handle], None]) -> None:
        """Have ``function(handle)`` called once when the request is over, at once if it is.

        It runs on a backend thread: it must be quick, must not wait for I/O, and what it raises is only logged. A thread
        in :meth:`wait` may go on before it has run.
        """
        operation, scheduler = self._operation, self._scheduler
        if os.getpid() != scheduler.pid:
            scheduler.check_process()
        # In one step: whoever announces the end may come at any time.
        operation.__dict__.setdefault("callbacks", []).append((function, self))
        if operation.is_finished:  # he may have come before the function: each of us takes what is there
            announce_callbacks(operation)
