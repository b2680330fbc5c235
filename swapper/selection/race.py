"""Which of two backends moves the bytes of a volume faster, found out on that volume."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections import deque

from swapper.backend import Direction, IOBackend
from swapper.config import Priority, SwapperConfig
from swapper.errors import SwapperError
from swapper.extents.extent import Extent
from swapper.memory.region import AlignedRegion
from swapper.scheduling.operation import Operation, OperationState
from swapper.scheduling.scheduler import IOScheduler
from swapper.wrappers.base import BackendWrapper

logger = logging.getLogger(__name__)

MIN_CAPACITY_BYTES = 256 << 20
"""On smaller volumes a race takes longer than it could ever save."""

_OPERATION_BYTES = 4 << 20  # about the engine's pages, each of which is several requests
_NUM_PLACES = 6  # of operations, for each direction
_SLOW_BYTES_PER_SECOND = 300e6
_CRAWLING_BYTES_PER_SECOND = 50e6
_ROUND_SECONDS = 0.025
_MAX_OPERATIONS = 64  # in a round
_NUM_ROUNDS = 7
_MAX_SECONDS = 1.0
_MIN_GAIN = 1.05
_MIN_SHARE_WON = 0.7
_DEADLINE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class RaceResult:
    """How a race ended.

    Attributes:
        is_won: The challenger was faster, by enough and in nearly all rounds.
        reason: Why, in words.
    """

    is_won: bool
    reason: str


def race(champion: IOBackend, challenger: IOBackend, config: SwapperConfig) -> RaceResult:
    """Have two backends of one volume read and write at once, in turns and under a scheduler, as in training.

    It takes about half a second, and is called off after a few MiB if the drive is slow. What lies in the volume is read
    first and then only written back, so that its content stays as it was; nobody else may use the volume meanwhile. Both
    backends stay open.

    Args:
        champion: Wins unless the challenger is clearly better.
        challenger: What is compared with it.
        config: Length and number of the requests.

    Raises:
        SwapperError: A transfer failed, or had no answer.
    """
    config = dataclasses.replace(config, deadline_seconds=_DEADLINE_SECONDS)
    course = _Course(champion.capacity_bytes)
    first, second = _Entrant(champion, config, course), _Entrant(challenger, config, course)
    try:
        return _run(first, second)
    finally:
        for entrant in (first, second):
            entrant.close()
        course.close()


def _run(first: _Entrant, second: _Entrant) -> RaceResult:
    started = time.perf_counter()
    speed = first.prepare()
    if speed < _SLOW_BYTES_PER_SECOND:
        return RaceResult(False, f"worker threads keep up with a drive of {speed / 1e6:.0f} MB/s")
    second.move(_NUM_PLACES)
    num_operations = 2 * _NUM_PLACES
    speed = 2 * num_operations * _OPERATION_BYTES / first.move(num_operations)
    num_operations = min(_MAX_OPERATIONS, max(num_operations, int(speed * _ROUND_SECONDS / 2 / _OPERATION_BYTES)))
    gains: list[float] = []
    while not gains or (len(gains) < _NUM_ROUNDS and time.perf_counter() - started < _MAX_SECONDS):
        # Each is first in every other round: what the drive does in the course of time then hits both.
        order = (first, second) if len(gains) % 2 else (second, first)
        seconds = {entrant: entrant.move(num_operations) for entrant in order}
        gains.append(seconds[first] / seconds[second])
    gain, num_won = statistics.median(gains), sum(one > 1 for one in gains)
    words = (
        f"it is {gain:.2f} times as fast as worker threads (median of {len(gains)} rounds, of which it won {num_won})"
    )
    return RaceResult(gain >= _MIN_GAIN and num_won >= _MIN_SHARE_WON * len(gains), words)


class _Course:
    """Knows which bytes of the volume are read and which are written, and their memory."""

    def __init__(self, capacity_bytes: int) -> None:
        num_bytes = _NUM_PLACES * _OPERATION_BYTES
        self.starts = (0, capacity_bytes // 2 // _OPERATION_BYTES * _OPERATION_BYTES)
        self.memory = [AlignedRegion(num_bytes).array() for _ in Direction]

    def close(self) -> None:
        """Let go of the memory now: the entrants' extents refer to them, and such circles wait for the garbage collector."""
        self.memory.clear()


class _Lent(BackendWrapper):
    """A backend that its scheduler does not close."""

    _has_hung = False

    def note_hang(self) -> None:
        """An operation on it does not end."""
        self._has_hung = True

    def close(self, timeout_seconds: float) -> bool:
        """Leave it to its owner."""
        return not self._has_hung


class _Entrant:
    """Knows one backend under a scheduler, and how to keep it busy."""

    def __init__(self, backend: IOBackend, config: SwapperConfig, course: _Course) -> None:
        self._block_bytes = backend.block_bytes
        self._course = course
        self._lent = _Lent(backend)
        self._scheduler = IOScheduler(self._lent, config)
        self._running: deque[Operation] = deque()
        self._error: SwapperError | None = None
        self._extents = [
            Extent(f"race {direction.name.lower()}", course.starts[direction], array.size, self, is_prewritten=True)
            for direction, array in zip(Direction, course.memory, strict=True)
        ]

    def prepare(self) -> float:
        """Read what lies in the volume and write it back; return at how many bytes per second it is written.

        The first write of reserved space is slow, and before that write a read of it does no I/O.
        """
        places = range(_NUM_PLACES)
        for part in Direction:
            self._carry_out([(Direction.READ, part, place) for place in places])
        speed = _OPERATION_BYTES / self._carry_out([(Direction.WRITE, Direction.WRITE, 0)])
        if speed >= _CRAWLING_BYTES_PER_SECOND:
            for part in Direction:
                seconds = self._carry_out([(Direction.WRITE, part, place) for place in places])
            speed = _NUM_PLACES * _OPERATION_BYTES / seconds
        return speed

    def move(self, num_operations: int) -> float:
        """Read one part so many times, and write the other; return the seconds it took."""
        return self._carry_out([(one, one, k % _NUM_PLACES) for k in range(num_operations) for one in Direction])

    def _carry_out(self, wanted: list[tuple[Direction, Direction, int]]) -> float:
        """Do it with a window of a few operations of each direction."""
        started = time.perf_counter()
        try:
            for direction, part, place in wanted:
                if len(self._running) == 2 * (_NUM_PLACES - 1):
                    self._wait_for_first()
                self._submit(direction, part, place * _OPERATION_BYTES)
        finally:
            while self._running:
                self._wait_for_first()
        if self._error is not None:
            raise self._error
        return time.perf_counter() - started

    def _submit(self, direction: Direction, part: Direction, offset: int) -> None:
        array = self._course.memory[part][offset : offset + _OPERATION_BYTES]
        operation = Operation(direction, self._extents[part], offset, array, Priority.PREFETCH, self._block_bytes)
        self._scheduler.submit(operation)
        self._running.append(operation)

    def _wait_for_first(self) -> None:
        operation = self._running.popleft()
        try:
            self._scheduler.wait(operation, None)
        except SwapperError as error:
            self._error = self._error or error
            if operation.state is not OperationState.DONE:
                self._lent.note_hang()

    def close(self) -> None:
        self._scheduler.close("the race is over")
