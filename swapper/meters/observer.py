"""Observers of transfers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from swapper.backend import Direction
from swapper.sync.callbacks import call_back


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
