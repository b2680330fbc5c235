"""A backend that answers some requests long after everybody has given up on them; no clock is involved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from swapper.backend import IOBackend, IORequest
from swapper.scheduling.scheduler import IOScheduler
from swapper.wrappers.base import BackendWrapper
from tests.waiting import wait_until


class LateBackend(BackendWrapper):
    """Keeps chosen requests, and carries them out when the test says so.

    Attributes:
        is_late: Says of a request whether it is kept; asked for those only that the main thread submits.
        kept: These requests.
    """

    def __init__(self, inner: IOBackend) -> None:
        super().__init__(inner)
        self.is_late: Callable[[Any], bool] = lambda request: False
        self.kept: list[Any] = []

    def submit(self, request: IORequest) -> None:
        """Keep the request, or pass it on."""
        if threading.current_thread() is threading.main_thread() and self.is_late(request):
            self.kept.append(request)
        else:
            self.inner.submit(request)

    def answer(self, index: int = 0) -> None:
        """Carry a kept request out, and return when its memory has what belongs there."""
        request = self.kept.pop(index)
        is_over = threading.Event()

        def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
            request.complete(transferred_bytes, error)
            is_over.set()

        self.inner.submit(IORequest(request.direction, request.offset, request.memory, request.address, complete))
        assert is_over.wait(300)

    def answer_all(self) -> None:
        """Carry all kept requests out."""
        while self.kept:
            self.answer()

    def close(self, timeout_seconds: float) -> bool:
        """Close the inner backend; return false if something hangs, as with a real drive."""
        return self.inner.close(timeout_seconds) and not self.kept


@contextlib.contextmanager
def waits(on_wait: Callable[[Any, Any], None]) -> Iterator[None]:
    """``on_wait`` is called whenever somebody is about to sleep until a request is over; what it raises is the outcome."""
    real = IOScheduler.sleep

    def sleep(self: IOScheduler, operation: Any, *args: Any, **kwargs: Any) -> None:
        if not operation.is_finished:
            await_hand_over(self)
            on_wait(self, operation)
        real(self, operation, *args, **kwargs)

    with mock.patch.object(IOScheduler, "sleep", sleep):
        yield


_LONG_TICKS = 1000
"""More than a deadline has."""


def await_hand_over(scheduler: Any) -> None:
    """Return when all that was asked for is with the backend, if that takes so much."""
    wait_until(
        lambda: not any(queue.num_queued and len(queue.inflight) < queue.limit for queue in scheduler.queues),
        "the hand-over",
    )


def stall(scheduler: Any) -> None:
    """A deadline passes for all transfers under way: they are over for everybody who waits."""
    await_hand_over(scheduler)
    with scheduler.lock:
        for queue in scheduler.queues:
            for transfer in queue.inflight:
                transfer.submitted_tick -= _LONG_TICKS
    scheduler._on_tick()
    with scheduler.lock:
        scheduler._tick -= 1
