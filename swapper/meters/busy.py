"""For how long anything was at work, counted once however many were."""

from __future__ import annotations

import threading
import time
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from swapper.backend import Direction

_EITHER = len(Direction)
_BEGIN = itemgetter(1)
_MOST_SPANS = 4096


class BusySeconds(NamedTuple):
    """Wall time with at least one transfer at a backend, of one moment: read, write <= either <= read + write."""

    read: float
    write: float
    either: float


class BusyTimes:
    """Knows since when reads and writes are at work, and for how long they were before; must not know transfers.

    Thread safe. Give one to several swappers as ``total``, and it counts the time in which any of them is at work: for
    drives that work side by side, the sum of their own times would be more than has passed.

    To begin and to end is a single step each, without a lock: what was a span of work is added up when somebody asks.
    """

    def __init__(self, total: BusyTimes | None = None) -> None:
        self._total = total
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Held while spans are added up."""
        self._since: dict[tuple[Direction, int], float] = {}
        """Direction and worker -> when it began, of those who are at work."""
        self._spans: deque[tuple[Direction, float, float]] = deque()
        """Direction, begin and end of work that is over and not added up yet."""
        self._counted_until = 0.0
        """Everything before that is in `_seconds`."""
        self._seconds = [0.0] * (_EITHER + 1)

    def begin(self, direction: Direction, worker: object = None) -> None:
        """``worker`` has begun to work in this direction; nothing happens if it has already."""
        times: BusyTimes | None = self
        while times is not None:
            times._since.setdefault((direction, id(worker)), time.perf_counter())
            worker, times = times, times._total

    def end(self, direction: Direction, worker: object = None) -> None:
        """``worker`` has nothing more to do in this direction."""
        times: BusyTimes | None = self
        while times is not None:
            since = times._since.pop((direction, id(worker)), None)
            if since is not None:
                times._spans.append((direction, since, time.perf_counter()))
                if len(times._spans) > _MOST_SPANS:
                    times.seconds()
            worker, times = times, times._total

    def seconds(self) -> BusySeconds:
        """Return the times until now, all of the same moment."""
        with self._lock:
            now = time.perf_counter()
            spans = [(direction, since, now) for (direction, _), since in tuple(self._since.items())]
            spans += [self._spans.popleft() for _ in range(len(self._spans))]
            spans.sort(key=_BEGIN)
            for counted in (*Direction, _EITHER):
                until = self._counted_until
                for direction, begin, end in spans:
                    if counted in (direction, _EITHER):
                        self._seconds[counted] += max(0.0, min(end, now) - max(begin, until))
                        until = max(until, end)
            self._counted_until = now
            return BusySeconds(*self._seconds)
