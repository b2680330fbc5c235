"""Time for hung transfers only: a deadline that a busy machine cannot miss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

LONG_SECONDS = 10_000.0
"""A deadline that never passes by itself."""


class Hanging(Protocol):
    """Something that knows how many transfers hang: a ``FaultInjectingBackend``, for example."""

    @property
    def num_hung(self) -> int: ...


@contextlib.contextmanager
def ticking(backend: Hanging, schedulers: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Inside the ``with`` block, the schedulers' time passes, fast, while all that is at their backend hangs."""
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.002):
            for scheduler in schedulers():
                num_inflight = sum(len(queue.inflight) for queue in scheduler.queues)
                if num_inflight and num_inflight == backend.num_hung:
                    scheduler._on_tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
