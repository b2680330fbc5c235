"""A thread that calls a method of somebody who may be gone at any moment."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from swapper.sync.bell import Bell, Latch
from swapper.sync.callbacks import call_back
from swapper.sync.lifetimes import when_gone
from swapper.sync.limits import start_threads
from swapper.sync.patience import join_all


def _serve(
    method: weakref.WeakMethod[Callable[[], None]], what: str, bell: Bell, stop: Latch, interval_seconds: float | None
) -> None:
    while True:
        bell.wait(interval_seconds)
        function = method()
        if function is None or stop.is_set():
            return
        call_back(function, what)  # whoever rings later needs this thread
        del function


def _stop(bell: Bell, stop: Latch) -> None:
    stop.set()
    bell.ring()


class Caller:
    """Knows a method to call on a thread of its own; must not know what it does.

    Args:
        method: Called soon after a ring; rings that come before that count as one. Its object is held weakly: one that
            nobody closes would live for ever.
        name: Of the thread.
        what: Names the call in the log, if it raises.
        interval_seconds: The method is also called when so much time has passed without a ring.

    Raises:
        LimitError: The system gives no more threads.
    """

    def __init__(self, method: Callable[[], None], name: str, what: str, interval_seconds: float | None = None) -> None:
        self._bell, self._stop = Bell(), Latch()
        when_gone(self, _stop, self._bell, self._stop)
        arguments = (weakref.WeakMethod(method), what, self._bell, self._stop, interval_seconds)
        self._thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        start_threads(self._thread)

    def ring(self) -> None:
        """Have the method called, soon and on the thread."""
        self._bell.ring()

    def close(self, timeout_seconds: float) -> None:
        """Stop the thread and wait for it, so long at most: it may hang in the method."""
        _stop(self._bell, self._stop)  # not by the finalizer, which an interrupt would use up
        join_all([self._thread], timeout_seconds)
