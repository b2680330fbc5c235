"""An update stream that runs no update ahead, so that what is pending is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def updates_on_demand(engine: Any) -> Iterator[None]:
    """Inside the ``with`` block updates go on only while the training thread waits for something, or the engine closes.

    No thread may have begun an update: enter it before the first step, or after a flush.
    """
    stream = engine._parts.stream
    update, is_over = stream._update, threading.Event()

    def update_on_demand(item: Any) -> None:
        while not (engine.waiting_for or stream._is_stopping or is_over.is_set()):
            time.sleep(0.0005)
        update(item)

    stream._update = update_on_demand
    try:
        yield
    finally:
        is_over.set()
        del stream._update


def num_pending(engine: Any) -> int:
    """Updates that have not ended."""
    return len(engine._parts.stream.pending())


def let_run_what_may(engine: Any, *, seconds: float = 60.0) -> None:
    """Return when all updates are done but those that wait until somebody needs their units."""
    stream, deadline_seconds = engine._parts.stream, time.monotonic() + seconds
    while True:
        with stream._lock:
            if all(job.is_held for job in stream._pending):
                return
        if time.monotonic() > deadline_seconds:
            raise TimeoutError(f"{num_pending(engine)} updates are still pending")
        time.sleep(0.001)
