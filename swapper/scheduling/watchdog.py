"""The thread that notices transfers which never end."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from swapper.sync.bell import Latch
from swapper.sync.callbacks import call_back
from swapper.sync.limits import start_threads

TICKS_PER_DEADLINE = 16
"""What has lasted for so many ticks is late. Counting ticks instead of reading a clock makes a stopped process (SIGSTOP,
a debugger) lose no time: the watchdog stands still with it."""


def tick_seconds(deadline_seconds: float) -> float:
    """Return the time between two ticks: a little less than a whole part of the deadline.

    So ``TICKS_PER_DEADLINE`` ticks after any moment, between 7/8 of the deadline and all of it has passed, with some
    time in hand for a watchdog that wakes up late.
    """
    return deadline_seconds / (TICKS_PER_DEADLINE + 0.5)


def _watch(on_tick: weakref.WeakMethod[Callable[[], None]], interval_seconds: float, stop: Latch) -> None:
    # The thread holds its scheduler weakly, or a swapper that nobody closes would live for ever.
    while not stop.wait(interval_seconds):
        function = on_tick()
        if function is None:
            return
        call_back(function, "looking for transfers that hang")
        del function


def _stop(stop: Latch, pid: int) -> None:
    if os.getpid() == pid:
        stop.set()


class Watchdog:
    """Knows a method to call a little more than ``TICKS_PER_DEADLINE`` times per deadline; must not know what it looks for."""

    def __init__(self, on_tick: Callable[[], None], deadline_seconds: float) -> None:
        stop = self._stop = Latch()
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, stop, self._pid)
        self._finalizer.atexit = False
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.WeakMethod(on_tick), tick_seconds(deadline_seconds), stop),
            name="swapper-watchdog",
            daemon=True,
        )
        start_threads(self._thread)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        _stop(self._stop, self._pid)  # not by the finalizer, which an interrupt would use up
        if self._thread is not threading.current_thread():
            self._thread.join()
