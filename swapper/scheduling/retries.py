"""Transfers that are tried again, but not at once."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from swapper.scheduling.operation import Transfer
from swapper.sync.bell import Bell
from swapper.sync.callbacks import call_back
from swapper.sync.limits import start_threads

_FIRST_SECONDS = 0.001
_MOST_SECONDS = 0.25


def delay_seconds(num_retries: int, *, has_moved: bool) -> float:
    """Return how long to wait before a transfer is tried for the ``num_retries``-th time again: doubled each time.

    One that has moved something goes on at once: what came in its way was a signal, or the end of a file system's extent.
    """
    return 0.0 if has_moved else min(_FIRST_SECONDS * 2.0 ** min(num_retries - 1, 16), _MOST_SECONDS)


class BackOff:
    """Knows transfers and when their turn comes; must not know why they failed. Thread safe.

    Its thread is there only while something waits.

    Args:
        resume: Called with those whose turn has come, on that thread.
    """

    def __init__(self, resume: Callable[[Sequence[Transfer]], None]) -> None:
        self._resume = resume
        self._lock = threading.RLock()
        self._changed = Bell()
        self._waiting: list[tuple[float, int, Transfer]] = []
        self._numbers = itertools.count()
        self._is_running = False

    def put(self, transfer: Transfer, seconds: float) -> bool:
        """Have the transfer's turn come in so many seconds; return false if there can be no thread (any more)."""
        with self._lock:
            if not self._is_running:
                try:
                    start_threads(threading.Thread(target=self._run, name="swapper-back-off", daemon=True))
                except RuntimeError:  # too many threads, or the interpreter ends
                    return False
                self._is_running = True
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), transfer))
        self._changed.ring()
        return True

    def cancel(self) -> list[Transfer]:
        """Return all that wait; their turn will not come."""
        with self._lock:
            transfers = [transfer for _, _, transfer in self._waiting]
            self._waiting.clear()
        self._changed.ring()
        return transfers

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            due: list[Transfer] = []
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                while self._waiting and self._waiting[0][0] <= now:
                    due.append(heapq.heappop(self._waiting)[2])
                next_seconds = self._waiting[0][0] - now if self._waiting else 0.0
            if due:
                call_back(partial(self._resume, due), "trying a transfer again")  # all others need this thread
            else:
                self._changed.wait(next_seconds)
            del due
