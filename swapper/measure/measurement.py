"""What drives do under the requests that the engine makes: read, write, and both at once.

[Note: how it is measured]
Everything goes through the scheduler of a swapper: extents, hazards, queues, handles and the backend are those of
training, only the data mean nothing. A window of requests is kept full: as soon as one is over the next is issued, sequentially
through the files and round again. The next measurement goes on where the last one ended, so that no cache on the way
still has the bytes. The time runs from the first request to the end of the last; where the page cache takes the writes,
it includes their way to the drive.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swapper.backend import Direction, IOBackend
from swapper.config import ALIGNMENT
from swapper.errors import ArgumentError
from swapper.measure.borrowed import BorrowedVolume
from swapper.measure.by_name import open_by_name
from swapper.measure.io_setting import OPERATION_BYTES, STEP_READ_SHARE, IOSetting, WindowSize, Workload
from swapper.measure.pattern import CheckedPattern
from swapper.measure.window import RequestWindow, Track
from swapper.scheduling.scheduler import IOScheduler
from swapper.uncopyable import Closable
from swapper.volumes.directory import DirectoryLike, as_directories
from swapper.volumes.volume import Volume

__all__ = ["STEP_READ_SHARE", "DriveTest", "IOSetting", "Progress", "Sample", "Workload"]

logger = logging.getLogger(__name__)


Progress = Callable[[int, int], None]
"""``progress(done_bytes, total_bytes)``"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        setting: How the requests were made.
        workload: What was done.
        read_bytes: Bytes read.
        write_bytes: Bytes written.
        seconds: Wall time.
        cpu_seconds: Processor time of this process meanwhile: user and system, all threads.
    """

    setting: IOSetting
    workload: Workload
    read_bytes: int
    write_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes moved per second, both directions together."""
        return (self.read_bytes + self.write_bytes) / self.seconds

    @property
    def cpu_cores(self) -> float:
        """Processor cores that were busy."""
        return self.cpu_seconds / self.seconds


class DriveTest(Closable):
    """Knows scratch files full of checkable data and how to measure on them; must not know which setting is good.

    Not thread safe.

    Args:
        directories: One per drive; a single one is taken as it is.
        file_bytes: Size of the scratch file in each of them, on average: faster drives get more of the sum. Rounded down
            to what can be used, see ``notes``.
        direct: Bypass the page cache where the file system can.
        deadline_seconds: A transfer without an answer for so long is an error.

    Attributes:
        paths: How another process of this user opens the nameless files: ``/proc/<pid>/fd/<number>``. Until ``close``.
        notes: What is not as asked, in words.

    Raises:
        ArgumentError: ``file_bytes`` is too small.
        VolumeError: A subclass says what is wrong with which directory; nothing was left behind.
    """

    def __init__(
        self,
        directories: Sequence[DirectoryLike] | DirectoryLike,
        file_bytes: int,
        *,
        direct: bool = True,
        deadline_seconds: float = 60.0,
    ) -> None:
        wanted = as_directories(directories)
        if file_bytes < ALIGNMENT:
            raise ArgumentError(f"file_bytes must be at least {ALIGNMENT}, got {file_bytes}")
        usable_bytes = file_bytes // ALIGNMENT * ALIGNMENT
        # Several files are filled stripe by stripe, and nothing must be left that was never written.
        self._stripe_bytes = min(OPERATION_BYTES, usable_bytes)
        if len(wanted) > 1:
            usable_bytes = usable_bytes // self._stripe_bytes * self._stripe_bytes
        self._volume = Volume(wanted, usable_bytes * len(wanted), stripe_bytes=self._stripe_bytes, direct=direct)
        self._pattern = CheckedPattern([file.num_bytes for file in self._volume.files])
        self._filled_bytes = 0
        self._direct = direct
        self._deadline_seconds = deadline_seconds
        self._positions = {Direction.READ: 0, Direction.WRITE: 0}
        self.paths = [f"/proc/{os.getpid()}/fd/{file.fd}" for file in self._volume.files]
        self.notes: tuple[str, ...] = ()
        if usable_bytes != file_bytes:
            self.notes = (f"{usable_bytes} of the {file_bytes} bytes asked for are used: whole blocks only",)
            logger.info("%s", self.notes[0])

    @property
    def num_bytes(self) -> int:
        """Size of all files together or, when the filling was cut short, of what is filled."""
        return self._filled_bytes or self._volume.capacity_bytes

    @property
    def is_direct(self) -> bool:
        """Whether all files can bypass the page cache."""
        return self._volume.is_direct

    def describe(self) -> str:
        """Return one line that says where the bytes go."""
        return self._volume.describe()

    def prepare(self, progress: Progress | None = None, *, max_seconds: float | None = None) -> None:
        """Fill the files: first writes of reserved blocks are slow, and reads of blocks never written do no I/O.

        Args:
            progress: Called after each few MiB.
            max_seconds: Stop filling after so long, but not before a few MiB, and use no more than what is filled.

        Raises:
            SwapperError: The drive failed.
        """
        setting = IOSetting("threads", self._stripe_bytes, num_threads=4, max_inflight=6 * len(self._volume.files))
        max_seconds = math.inf if max_seconds is None else max_seconds
        self._filled_bytes = 0
        self._filled_bytes = self._pass_over(
            setting, Direction.WRITE, self._volume.capacity_bytes, progress, max_seconds
        )

    def measure(
        self,
        setting: IOSetting,
        workload: Workload,
        seconds: float,
        *,
        read_share: float = STEP_READ_SHARE,
        verify: bool = False,
    ) -> Sample:
        """Keep the drives busy for a time; see [Note: how it is measured].

        Args:
            setting: How to make the requests.
            workload: What to do.
            seconds: No request is issued after this long, but at least one is.
            read_share: Of the bytes of a mixed workload, so many are read. The two directions never drift apart.
            verify: Compare what is read with what was written. It costs time: not for figures.

        Raises:
            ArgumentError: An argument cannot work, or the files are too small for so many bytes in flight.
            WrongDataError: Something else was read than was written.
            SwapperError: The drive failed, or the backend cannot work here.
        """
        self._check_filled("measure")
        if not seconds > 0 or not 0 < read_share < 1:
            raise ArgumentError(
                f"seconds must be positive and read_share inside (0, 1), got {seconds} and {read_share}"
            )
        volume = BorrowedVolume(self._volume, self._filled_bytes)
        volume.restripe(setting.request_bytes)
        with self._scheduler(setting, volume) as (scheduler, backend):
            size = _window_size(setting, backend)
            tracks = self._tracks(setting, workload, size, volume.capacity_bytes)
            window = RequestWindow(scheduler, backend, volume, self._pattern, size, workload, checks_reads=verify)
            is_cached = not backend.is_direct
            if is_cached:
                volume.drop_cache()
            cpu_seconds = -_cpu_seconds()
            started = time.perf_counter()
            stop = started + seconds
            is_first = True
            while is_first or not window.is_idle:
                while window.has_room and (is_first or time.perf_counter() < stop):
                    is_first = False
                    direction = _choose(tracks, read_share)
                    if is_cached and direction is Direction.READ and tracks[direction].is_at_end:
                        volume.drop_cache()
                    window.issue(direction, tracks[direction])
                window.complete()
            if is_cached and Direction.WRITE in tracks:
                volume.sync()
            elapsed = time.perf_counter() - started
            cpu_seconds += _cpu_seconds()
        for direction, track in tracks.items():
            self._positions[direction] = track.position
        done = window.done_bytes
        return Sample(setting, workload, done[Direction.READ], done[Direction.WRITE], elapsed, cpu_seconds)

    def verify(self, setting: IOSetting, progress: Progress | None = None) -> None:
        """Read everything back and compare it with what was written last.

        Args:
            setting: How to read.
            progress: Called after each few MiB.

        Raises:
            WrongDataError: Something else was read.
            SwapperError: The drive failed.
        """
        self._check_filled("verify")
        self._pass_over(setting, Direction.READ, self._filled_bytes, progress, math.inf)

    def close(self) -> None:
        """Give the space back. Idempotent."""
        self._volume.close()

    def _check_filled(self, method: str) -> None:
        if not self._filled_bytes:
            raise ArgumentError(f"the files hold nothing yet: call prepare() before {method}()")

    @contextlib.contextmanager
    def _scheduler(self, setting: IOSetting, volume: BorrowedVolume) -> Iterator[tuple[IOScheduler, IOBackend]]:
        config = setting.swapper_config(direct=self._direct, deadline_seconds=self._deadline_seconds)
        backend = open_by_name(volume, config)
        scheduler = IOScheduler(backend, config)
        try:
            yield scheduler, backend
        finally:
            scheduler.close("the measurement is over")

    def _tracks(
        self, setting: IOSetting, workload: Workload, size: WindowSize, capacity_bytes: int
    ) -> dict[Direction, Track]:
        """Where each direction goes; in a mixed workload they keep to a half each, so that they never meet."""
        half = capacity_bytes // 2 // setting.request_bytes * setting.request_bytes
        ranges = {
            Workload.READ: {Direction.READ: (0, capacity_bytes)},
            Workload.WRITE: {Direction.WRITE: (0, capacity_bytes)},
            Workload.MIXED: {Direction.READ: (0, half), Direction.WRITE: (half, capacity_bytes)},
        }[workload]
        window_bytes = size.operation_bytes * size.operations_for(workload)
        if any(stop - start < window_bytes for start, stop in ranges.values()):
            least = window_bytes * (2 if workload is Workload.MIXED else 1)
            raise ArgumentError(
                f"{self.num_bytes} bytes of files are too few for {setting.describe()} ({workload.value}): at least "
                f"{least} are needed; take a larger file_bytes, smaller requests or fewer in flight"
            )
        return {
            direction: Track(start, stop, self._positions[direction], size.operation_bytes)
            for direction, (start, stop) in ranges.items()
        }

    def _pass_over(
        self,
        setting: IOSetting,
        direction: Direction,
        num_bytes: int,
        progress: Progress | None,
        max_seconds: float,
    ) -> int:
        """Read and check, or write, every byte once; return how many, if time was up before."""
        volume = BorrowedVolume(self._volume, num_bytes)
        with self._scheduler(setting, volume) as (scheduler, backend):
            size = _window_size(setting, backend)
            workload = Workload.READ if direction is Direction.READ else Workload.WRITE
            window = RequestWindow(scheduler, backend, volume, self._pattern, size, workload, checks_reads=True)
            if direction is Direction.READ and not backend.is_direct:
                volume.drop_cache()
            track = Track(0, num_bytes, 0, size.operation_bytes)
            stop_at = math.inf
            while True:
                while window.has_room and track.issued_bytes < num_bytes and time.monotonic() < stop_at:
                    window.issue(direction, track)
                stop_at = min(stop_at, time.monotonic() + max_seconds)
                if window.is_idle:
                    return track.issued_bytes
                window.complete()
                if progress is not None:
                    progress(window.done_bytes[direction], num_bytes)


def _window_size(setting: IOSetting, backend: IOBackend) -> WindowSize:
    return WindowSize(setting.request_bytes, min(setting.max_inflight, backend.concurrency))


def _choose(tracks: dict[Direction, Track], read_share: float) -> Direction:
    """The direction that is behind its share."""
    if len(tracks) == 1:
        return next(iter(tracks))
    read_bytes, write_bytes = tracks[Direction.READ].issued_bytes, tracks[Direction.WRITE].issued_bytes
    return Direction.READ if read_bytes * (1 - read_share) <= write_bytes * read_share else Direction.WRITE


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
