"""For how long anything was at work, counted once however many were."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from swapper.backend import Direction

_EITHER = len(Direction)


class BusySeconds(NamedTuple):
    """Wall time with at least one transfer at a backend, of one moment: read, write <= either <= read + write."""

    read: float
    write: float
    either: float


class BusyTimes:
    """Knows since when reads and writes are at work, and for how long they were before; must not know transfers.

    Thread safe. Give one to several swappers as ``total``, and it counts the time in which any of them is at work: for
    drives that work side by side, the sum of their own times would be more than has passed.
    """

    def __init__(self, total: BusyTimes | None = None) -> None:
        self._total = total
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        # Who is at work, by direction: sets and not numbers, so that a call cut off by a signal can be repeated.
        self._workers: tuple[set[int], ...] = tuple(set() for _ in Direction)
        self._since = [0.0] * (_EITHER + 1)
        self._seconds = [0.0] * (_EITHER + 1)

    def begin(self, direction: Direction, worker: object = None) -> None:
        """``worker`` has begun to work in this direction; nothing happens if it has already."""
        with self._lock:
            now = time.perf_counter()
            if not any(self._workers):
                self._since[_EITHER] = now
            if not self._workers[direction]:
                self._since[direction] = now
            self._workers[direction].add(id(worker))
        if self._total is not None:
            self._total.begin(direction, self)

    def end(self, direction: Direction, worker: object = None) -> None:
        """``worker`` has nothing more to do in this direction."""
        with self._lock:
            if id(worker) in self._workers[direction]:
                now = time.perf_counter()
                self._workers[direction].discard(id(worker))
                if not self._workers[direction]:
                    self._seconds[direction] += now - self._since[direction]
                if not any(self._workers):
                    self._seconds[_EITHER] += now - self._since[_EITHER]
        if self._total is not None:
            self._total.end(direction, self)

    def seconds(self) -> BusySeconds:
        """Return the times until now, all of the same moment."""
        with self._lock:
            now = time.perf_counter()
            is_busy = [*map(bool, self._workers), any(self._workers)]
            return BusySeconds(
                *(
                    done + (now - since if busy else 0.0)
                    for done, since, busy in zip(self._seconds, self._since, is_busy, strict=True)
                )
            )
