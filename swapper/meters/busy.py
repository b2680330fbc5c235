"""The wall time in which at least one transfer was running."""

from __future__ import annotations

import threading
import time
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from swapper.backend import Direction

_EITHER = len(Direction)  # the index of the union, behind those of the directions
_BEGIN = itemgetter(1)
_MOST_SPANS = 4096  # then they are added up, also if nobody asks: it bounds their memory


class BusySeconds(NamedTuple):
    """Wall times with at least one transfer at a backend, up to one moment: read, write <= either <= read + write."""

    read: float
    write: float
    either: float


class BusyTimes:
    """The time in which reads, writes, or either of them were running. Thread safe.

    If several have the same ``total``, that counts the time in which any of them is busy. The sum of their own times
    would count drives that work side by side several times.
    """

    # begin() and end() run for each busy period of a queue, so they take no lock: a dict and a deque change in single
    # steps. seconds() adds the spans up.

    def __init__(self, total: BusyTimes | None = None) -> None:
        self._total = total
        # Held while spans are added up; see [Note: coming in between] in swapper.sync.reentry.
        self._lock = threading.RLock()
        self._since: dict[tuple[Direction, int], float] = {}  # (direction, id of a worker) -> when it began
        self._spans: deque[tuple[Direction, float, float]] = deque()  # direction, begin, end: not added up yet
        self._counted_until = 0.0  # all time before is in _seconds
        self._seconds = [0.0] * (_EITHER + 1)

    def begin(self, direction: Direction, worker: object = None) -> None:
        """Note that ``worker`` is busy in this direction; a second call does nothing."""
        times: BusyTimes | None = self  # then its total, whose worker it is
        while times is not None:
            times._since.setdefault((direction, id(worker)), time.perf_counter())
            worker, times = times, times._total

    def end(self, direction: Direction, worker: object = None) -> None:
        """Note that ``worker`` is idle in this direction."""
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
        # Example: reads in [0, 4) and [2, 6), a write in [5, 7). In order of their begin, each adds what is behind the
        # end of those before: read 4 + 2 = 6, write 2, either 4 + 2 + 1 = 7.
        with self._lock:
            now = time.perf_counter()
            # Spans that are still open end now; the next call counts their rest, from _counted_until on.
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
