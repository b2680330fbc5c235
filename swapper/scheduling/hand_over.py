"""The thread that gives a backend what the main thread has asked for.

[Note: signals]
Python runs signal handlers on the main thread, between any two calls, and what they raise (``KeyboardInterrupt``) ends
whatever is going on there. A transfer that is being handed over at such a moment would be lost: nobody could tell whether
the backend has it, so its memory could be neither used again nor given up. So the main thread never talks to a backend.
It queues an operation, which is undone if it is cut off, and rings; a ring that an interrupt prevents is made up for by
whoever waits, and by the watchdog.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from swapper.sync.bell import Bell, Latch
from swapper.sync.callbacks import call_back
from swapper.sync.limits import start_threads
from swapper.sync.patience import join_all


def _serve(hand_over: weakref.WeakMethod[Callable[[], None]], bell: Bell, stop: Latch) -> None:
    # The thread holds its scheduler weakly, or a swapper that nobody closes would live for ever.
    while bell.wait() and not stop.is_set():
        function = hand_over()
        if function is None:
            return
        call_back(function, "handing transfers over")  # all that is asked for later needs this thread
        del function


def _stop(bell: Bell, stop: Latch, pid: int) -> None:
    if os.getpid() == pid:
        stop.set()
        bell.ring()


class HandOver:
    """Knows a method to call when it is rung; must not know what is handed over. See [Note: signals]."""

    def __init__(self, hand_over: Callable[[], None]) -> None:
        self._bell = Bell()
        self._stop = Latch()
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, self._bell, self._stop, self._pid)
        self._finalizer.atexit = False
        self._thread = threading.Thread(
            target=_serve,
            args=(weakref.WeakMethod(hand_over), self._bell, self._stop),
            name="swapper-hand-over",
            daemon=True,
        )
        start_threads(self._thread)

    def ring(self) -> None:
        """Have the method called, soon and on the thread; rings that come before that count as one."""
        self._bell.ring()

    def close(self, timeout_seconds: float) -> None:
        """Stop the thread and wait for it, so long at most: it may hang in a backend."""
        _stop(self._bell, self._stop, self._pid)  # not by the finalizer, which an interrupt would use up
        join_all([self._thread], timeout_seconds)
