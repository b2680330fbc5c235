"""Calls of torch that may never return, with an end: torch's clients of a store wait for a dead network as long as TCP does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from swapper.sync.limits import start_threads

T = TypeVar("T")
_LOOK_SECONDS = 0.25


def within(seconds: float, function: Callable[[], T], look: Callable[[], None] = lambda: None) -> T:
    """Call ``function`` in a thread of its own, and return what it returns or raise what it raises.

    Args:
        seconds: how long to wait. A call that takes longer is left to itself: its thread ends with the process.
        function: Releases Python's lock while it waits.
        look: called now and then meanwhile; what it raises ends the waiting.

    Raises:
        TimeoutError: the time is over.
        LimitError: the system gives no thread.
    """
    call: Future[T] = Future()

    def run() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    start_threads(threading.Thread(target=run, name="infinity-bounded", daemon=True))
    deadline = time.monotonic() + seconds
    while not wait([call], max(min(deadline - time.monotonic(), _LOOK_SECONDS), 0.0)).done:
        look()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no answer in {seconds:.0f} s")
    return call.result()
