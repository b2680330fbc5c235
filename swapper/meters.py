"""Observers of transfers, and the wall time in which at least one transfer was running."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from swapper.backend import Direction
from swapper.sync.callbacks import call_back

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
        """Return the spans in which a new worker records its busy times: one here, and one in each total."""
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


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One transfer that is over.

    Attributes:
        direction: Read or write.
        extent_name: The extent it belongs to.
        num_bytes: Bytes moved, as in the statistics: 0 if it failed, fewer if it was short.
        queued_seconds: From the moment at which its operation was ready to its submission to the backend.
        began_seconds: Its submission to the backend, by ``time.perf_counter``.
        ended_seconds: Its completion, by the same clock.
    """

    direction: Direction
    extent_name: str
    num_bytes: int
    queued_seconds: float
    began_seconds: float
    ended_seconds: float


Observer = Callable[[TransferRecord], None]


class Observers:
    """The observers of one swapper, and records that they have not got yet."""

    def __init__(self) -> None:
        self.present: tuple[Observer, ...] = ()  # while it is empty, the scheduler makes no records and reads no clock
        # Added under the scheduler's lock, and passed on by `notify` outside of it: an observer may use the swapper.
        self.records: deque[TransferRecord] = deque()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` after every transfer from now on; return a function that ends this."""
        self.present = (*self.present, observer)  # a new tuple: notify() may iterate over the old one

        def remove() -> None:
            self.present = tuple(other for other in self.present if other is not observer)

        return remove

    def notify(self) -> None:
        """Call the observers with all records; on a backend's thread, so what an observer raises is only logged."""
        while self.records:
            try:
                record = self.records.popleft()
            except IndexError:  # another thread took the last one
                return
            for observer in self.present:
                call_back(partial(observer, record), "an observer of transfers")
