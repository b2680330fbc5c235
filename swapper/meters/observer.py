"""Who wants to hear of each transfer."""

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
        extent_name: Whose bytes.
        num_bytes: As many as count in the statistics: 0 if it failed, the part that came if it was short.
        queued_seconds: Between the moment at which its operation could have begun and its hand-over to the backend.
        began_seconds: Its hand-over to the backend, as ``time.perf_counter`` gives it.
        ended_seconds: Its completion, likewise.
    """

    direction: Direction
    extent_name: str
    num_bytes: int
    queued_seconds: float
    began_seconds: float
    ended_seconds: float


Observer = Callable[[TransferRecord], None]


class Observers:
    """Knows whom to tell of transfers.

    Records are put here under the scheduler's lock and told outside of it: an observer may use the swapper.
    """

    def __init__(self) -> None:
        self.present: tuple[Observer, ...] = ()
        """Those there are: while it is empty, nothing need be noted."""
        self._records: deque[TransferRecord] = deque()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Tell ``observer`` of every transfer from now on; return what ends that."""
        self.present = (*self.present, observer)

        def remove() -> None:
            self.present = tuple(other for other in self.present if other is not observer)

        return remove

    def add_record(self, record: TransferRecord) -> None:
        """Take a record; `notify` passes it on."""
        self._records.append(record)

    def notify(self) -> None:
        """Pass on what was noted; on a backend's thread, so what an observer raises goes no further."""
        while self._records:
            try:
                record = self._records.popleft()
            except IndexError:  # another thread has told it
                return
            for observer in self.present:
                call_back(partial(observer, record), "an observer of transfers")
