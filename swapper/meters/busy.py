"""The wall time in which at least one transfer was running."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from swapper.backend import Direction

_EITHER = len(Direction)  # the index of the union, behind those of the directions
_BEGIN = itemgetter(1)
MOST_SPANS = 4096
"""So many spans of a worker are added up, also if nobody asks: it bounds their memory."""


class BusySeconds(NamedTuple):
    """Wall times with at least one transfer at a backend, up to one moment: read, write <= either <= read + write."""

    read: float
    write: float
    either: float


class BusySpans:
    """When one worker was busy, as far as it is not added up. The worker writes it, under a lock of its own.

    It writes by hand and without a call, for each busy period of a queue: `TransferQueue` says how.

    Attributes:
        begun: When the present period began, by ``time.perf_counter``; empty while the worker is idle.
        ended: Begin and end of periods that are over.
        add_up: Empties ``ended``: for a worker that finds `MOST_SPANS` in it.
    """

    __slots__ = ("add_up", "begun", "ended")

    def __init__(self, add_up: Callable[[], object]) -> None:
        self.begun: list[float] = []
        self.ended: deque[tuple[float, float]] = deque()
        self.add_up = add_up


class BusyTimes:
    """The time in which reads, writes, or either of them were running. Thread safe.

    If several have the same ``total``, that counts the time in which any of them is busy. The sum of their own times
    would count drives that work side by side several times.
    """

    def __init__(self, total: BusyTimes | None = None) -> None:
        self._total = total
        # Held while spans are added up; see [Note: coming in between] in swapper.sync.reentry.
        self._lock = threading.RLock()
        self._workers: list[tuple[Direction, BusySpans]] = []
        self._counted_until = 0.0  # all time before is in _seconds
        self._seconds = [0.0] * (_EITHER + 1)

    def watch(self, direction: Direction) -> tuple[BusySpans, ...]:
        """Return what a new worker has to write to, in all of them alike: one for each total."""
        own = BusySpans(self.seconds)
        self._workers.append((direction, own))
        return (own, *(self._total.watch(direction) if self._total is not None else ()))

    def seconds(self) -> BusySeconds:
        """Return the times until now, all of the same moment."""
        # Example: reads in [0, 4) and [2, 6), a write in [5, 7). In order of their begin, each adds what is behind the
        # end of those before: read 4 + 2 = 6, write 2, either 4 + 2 + 1 = 7.
        with self._lock:
            now = time.perf_counter()
            spans: list[tuple[Direction, float, float]] = []
            for direction, worker in self._workers:
                # Spans that are still open end now; the next call counts their rest, from _counted_until on. This look
                # comes first: a period that ends meanwhile may be found twice, which adds nothing, but not missed.
                spans += [(direction, begun, now) for begun in worker.begun.copy()]
                spans += [(direction, *worker.ended.popleft()) for _ in range(len(worker.ended))]
            spans.sort(key=_BEGIN)
            for counted in (*Direction, _EITHER):
                until = self._counted_until
                for direction, begin, end in spans:
                    if counted in (direction, _EITHER):
                        self._seconds[counted] += max(0.0, min(end, now) - max(begin, until))
                        until = max(until, end)
            self._counted_until = now
            return BusySeconds(*self._seconds)
