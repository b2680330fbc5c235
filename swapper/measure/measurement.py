"""Measurements of drives under the engine's kind of requests: reads, writes, and both at once.

[Note: how it is measured]
All requests go through the scheduler and the backend of a swapper, as in training. A fixed number of buffers is in use:
as soon as an operation ends, the next one starts with its buffer, sequentially through the files and from their
beginning again. The next measurement continues where the last one ended, so that no cache still has the bytes. The time
runs from the first request to the end of the last. If the page cache takes the writes, it includes their sync to the
drive.
"""

from __future__ import annotations

import math
import os
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IOBackend, register_memory
from swapper.config import ALIGNMENT, BackendName, Priority, SwapperConfig
from swapper.errors import ArgumentError
from swapper.extents.extent import Extent
from swapper.measure.by_name import open_by_name
from swapper.memory.region import AlignedRegion
from swapper.scheduling.operation import Handle, Operation
from swapper.scheduling.scheduler import IOScheduler
from swapper.uncopyable import Closable
from swapper.volumes.directory import DirectoryLike, as_directories
from swapper.volumes.striping import StripeMap, deal
from swapper.volumes.volume import Volume

_OPERATION_BYTES = 4 << 20  # the engine's reads and writes are about this long, and cut into requests
_OPERATIONS_UNDER_WAY = 8  # at least, as far as there are requests for them
# A step with bf16 and AdamW reads 14 bytes per parameter (weight 2 for forward and 2 for backward, state 10) and writes
# 12 (weight 2, state 10): see docs/how-it-works/index.md.
_SHARES = {Direction.READ: 14, Direction.WRITE: 12}


class Workload(Enum):
    """What a measurement does."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"  # the reads and writes of an optimizer step, at the same time


@dataclass(frozen=True, slots=True)
class IOSetting:
    """The settings by which requests are made.

    Attributes:
        backend: What moves the bytes.
        request_bytes: Largest single transfer. Multiple of 4096.
        num_threads: Worker threads for each direction, if the backend has any.
        max_inflight: Transfers at once: of one direction, or of both together in a mixed workload.
    """

    backend: BackendName
    request_bytes: int
    num_threads: int
    max_inflight: int

    @property
    def has_threads(self) -> bool:
        """Whether each transfer blocks a thread, so that there are at most as many transfers as threads."""
        return self.backend in ("threads", "aiofiles")

    @property
    def num_inflight(self) -> int:
        """Transfers at once on one drive; each drive has threads of its own."""
        return min(self.max_inflight, self.num_threads) if self.has_threads else self.max_inflight

    @property
    def bytes_inflight(self) -> int:
        """Bytes in flight at once on one drive."""
        return self.request_bytes * self.num_inflight

    def describe(self) -> str:
        """Return a few words for tables and logs."""
        size = f"{self.request_bytes / 1e6:.1f} MB"
        return f"{self.backend}, {size} x {self.num_inflight} in flight"

    def swapper_config(self, *, direct: bool = True, deadline_seconds: float = 120.0) -> SwapperConfig:
        """Return the config of a swapper with these settings.

        Raises:
            ArgumentError: A value cannot work.
        """
        return SwapperConfig(**asdict(self), direct=direct, deadline_seconds=deadline_seconds)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        setting: How the requests were made.
        workload: What was done.
        read_bytes: Bytes read.
        write_bytes: Bytes written.
        seconds: Wall time.
        cpu_seconds: CPU time of this process meanwhile: user and system, all threads.
    """

    setting: IOSetting
    workload: Workload
    read_bytes: int
    write_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def num_bytes(self) -> int:
        """Bytes moved, both directions together."""
        return self.read_bytes + self.write_bytes

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return self.num_bytes / self.seconds

    @property
    def cpu_cores(self) -> float:
        """CPU cores that were busy."""
        return self.cpu_seconds / self.seconds


class DriveTest(Closable):
    """Scratch files, and measurements on them. Not thread safe.

    Args:
        directories: One per drive.
        file_bytes: Size of the scratch file in each of them, on average: faster drives get more of the sum. Rounded
            down to whole blocks, with several drives to whole stripes of 4 MiB.
        direct: Bypass the page cache where the file system can.
        deadline_seconds: A transfer without an answer for so long is an error.

    Attributes:
        num_bytes: Size of all files together or, when the filling was cut short, of what is filled.

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
        self._stripe_bytes = min(_OPERATION_BYTES, file_bytes // ALIGNMENT * ALIGNMENT)
        unit_bytes = self._stripe_bytes if len(wanted) > 1 else ALIGNMENT
        self.num_bytes = file_bytes // unit_bytes * unit_bytes * len(wanted)
        self._volume = Volume(wanted, self.num_bytes, stripe_bytes=self._stripe_bytes, direct=direct)
        self._direct, self._deadline_seconds = direct, deadline_seconds
        self._is_filled = False
        self._positions = dict.fromkeys(Direction, 0)

    @property
    def is_direct(self) -> bool:
        """Whether all files can bypass the page cache."""
        return self._volume.is_direct

    def prepare(self, *, max_seconds: float = math.inf) -> None:
        """Fill the files: first writes of reserved blocks are slow, and reads of blocks never written do no I/O.

        Args:
            max_seconds: Stop filling after so long, but not before a few MiB, and use no more than what is filled.

        Raises:
            SwapperError: The drive failed.
        """
        self._is_filled = False
        setting = IOSetting("threads", self._stripe_bytes, num_threads=4, max_inflight=6 * len(self._volume.files))
        self._move(setting, Workload.WRITE, max_seconds)

    def measure(self, setting: IOSetting, workload: Workload, seconds: float) -> Sample:
        """Keep the drives busy for a time; see [Note: how it is measured].

        Args:
            setting: How to make the requests.
            workload: What to do. A mixed one keeps its two directions in step.
            seconds: After this time no request is issued, but for the first ones.

        Raises:
            ArgumentError: The files are too small for so many bytes in flight, or not filled.
            SwapperError: The drive failed, or the backend cannot work here.
        """
        if not self._is_filled:
            raise ArgumentError("the files hold nothing yet: call prepare() before measure()")
        return self._move(setting, workload, seconds)

    def close(self) -> None:
        """Give the space back. Idempotent."""
        self._volume.close()

    def _move(self, setting: IOSetting, workload: Workload, seconds: float) -> Sample:
        """Run operations until time is up or, the first time, until the files are filled; and wait for the last."""
        volume = BorrowedVolume(self._volume, self.num_bytes, setting.request_bytes)
        config = setting.swapper_config(direct=self._direct, deadline_seconds=self._deadline_seconds)
        backend = open_by_name(volume, config)
        scheduler = IOScheduler(backend, config)
        try:
            num_inflight = min(setting.max_inflight, backend.concurrency)
            # Requests per operation, and operations at once. io_uring with 32 requests of 1 MiB in flight: operations
            # of min(4, 32 // 8) = 4 requests, and 32 / 4 + 1 = 9 of them. One more than fit, so that the next request
            # waits when one ends. A mixed workload of single requests gets none more: the scheduler limits each
            # direction, and not their sum.
            together = max(1, min(_OPERATION_BYTES // setting.request_bytes, num_inflight // _OPERATIONS_UNDER_WAY))
            num_steps = -(-num_inflight // together) + (workload is not Workload.MIXED or together > 1)
            step_bytes = setting.request_bytes * together
            ranges = _ranges(workload, volume.capacity_bytes, setting.request_bytes)
            if self._is_filled and any(last - first < step_bytes * num_steps for first, last in ranges.values()):
                raise ArgumentError(
                    f"{self.num_bytes} bytes of files are too few for {setting.describe()} ({workload.value}); take a larger "
                    "file_bytes, smaller requests or fewer in flight"
                )
            stop = time.perf_counter() + seconds  # from here on: the set-up of the backend does not count
            tracks = {way: _Track(*ends, self._positions[way], step_bytes) for way, ends in ranges.items()}
            window = _Window(scheduler, backend, volume, step_bytes, num_steps)
            if not backend.is_direct:
                volume.drop_cache()
            cpu_seconds, started = -time.process_time(), time.perf_counter()
            window.run(tracks, stop, most_bytes=math.inf if self._is_filled else volume.capacity_bytes)
            if not backend.is_direct and Direction.WRITE in tracks:
                volume.sync()
            elapsed = time.perf_counter() - started
            cpu_seconds += time.process_time()
        finally:
            scheduler.close("the measurement is over")
        for direction, track in tracks.items():
            self._positions[direction] = track.position
        if not self._is_filled:
            self.num_bytes, self._is_filled = min(tracks[Direction.WRITE].issued_bytes, volume.capacity_bytes), True
        read, written = (tracks[way].issued_bytes if way in tracks else 0 for way in Direction)
        return Sample(setting, workload, read, written, elapsed, cpu_seconds)


class BorrowedVolume(Volume):
    """The files of another volume. A backend closes its volume, but to close this one closes nothing.

    Args:
        owner: Has the files; must stay open meanwhile.
        num_bytes: How many bytes are used, from the first address on.
        stripe_bytes: Length of the stripes over them; a single file has none. Multiple of 4096.
    """

    def __init__(self, owner: Volume, num_bytes: int, stripe_bytes: int) -> None:
        self.__dict__.update(vars(owner))  # all attributes, without the constructor, which makes files
        self.capacity_bytes = num_bytes
        if not self.stripe_bytes:
            return
        # The used parts of the files are striped anew.
        # Two files with 24 and 8 MiB used, new stripes of 2 MiB: rooms = [12, 4], cycle = [0, 0, 1, 0], and
        # min(12 // 3, 4 // 1) = 4 cycles: 16 stripes, 32 MiB.
        used = [0 for _ in self.files]
        for column, file_offset, low, high in self.file_ranges(0, self.capacity_bytes):
            used[column] = max(used[column], file_offset + high - low)
        rooms = [num_bytes // stripe_bytes for num_bytes in used]
        cycle = deal(rooms)  # a drive's used bytes are in proportion to its speed, so they serve as the speed
        # Whole cycles only: with other files full, the end of the address space would be on one drive, and measured so.
        num_stripes = len(cycle) * min((rooms[column] // cycle.count(column) for column in cycle), default=0)
        self._map = StripeMap(num_stripes, stripe_bytes, rooms, rooms, range(len(rooms)), rooms)
        self.stripe_bytes = stripe_bytes
        self.capacity_bytes = num_stripes * stripe_bytes

    def close(self) -> None:
        """Leave the files to their owner."""

    def drop_cache(self) -> None:
        """Drop the files from the page cache, so that the next reads come from the drives."""
        self.sync()  # only clean pages can be dropped
        for file in self.files:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _Track:
    """The position of one direction, which runs through a range of the volume again and again.

    Args:
        start: First byte of the range.
        stop: The byte behind its last one.
        position: Where to continue, if that is in the range.
        step_bytes: Length of a step; the last one of the range may be shorter.
    """

    def __init__(self, start: int, stop: int, position: int, step_bytes: int) -> None:
        self._start, self._stop, self._step_bytes = start, stop, step_bytes
        self.position = start + max(0, position - start) // step_bytes * step_bytes
        self.issued_bytes = 0

    def advance(self) -> tuple[int, int]:
        """Return offset and length of the next step."""
        offset = self._start if self.position >= self._stop else self.position
        num_bytes = min(self._step_bytes, self._stop - offset)
        self.position = offset + num_bytes
        self.issued_bytes += num_bytes
        return offset, num_bytes


class _Window:
    """A fixed number of buffers, and the reads and writes that use them."""

    def __init__(
        self, scheduler: IOScheduler, backend: IOBackend, volume: Volume, step_bytes: int, num_steps: int
    ) -> None:
        self._scheduler = scheduler
        self._extent = Extent("drive test", 0, volume.capacity_bytes, volume, is_prewritten=True)
        region = AlignedRegion(step_bytes * num_steps)
        memory = region.array()
        memory[:] = np.random.default_rng(20).integers(0, 256, memory.size, np.uint8)  # no drive can compress it
        register_memory(backend, region)  # as the engine does with its pages
        self._buffers = [memory[start : start + step_bytes] for start in range(0, memory.size, step_bytes)]
        self._under_way: dict[Handle, npt.NDArray[np.uint8]] = {}
        self._over: queue.SimpleQueue[Handle] = queue.SimpleQueue()  # filled by callbacks, at most one for each buffer

    def run(self, tracks: Mapping[Direction, _Track], stop: float, most_bytes: float) -> None:
        """Start an operation with each buffer, and the next one when it ends, until a time and a number of bytes.

        Raises:
            SwapperError: An operation failed.
        """
        for memory in self._buffers:
            self._issue(tracks, memory)
        while self._under_way:
            handle = self._over.get()
            memory = self._under_way.pop(handle)
            if handle.error is not None:
                raise handle.error
            if time.perf_counter() < stop and sum(track.issued_bytes for track in tracks.values()) < most_bytes:
                self._issue(tracks, memory)

    def _issue(self, tracks: Mapping[Direction, _Track], memory: npt.NDArray[np.uint8]) -> None:
        direction = min(tracks, key=lambda way: tracks[way].issued_bytes / _SHARES[way])  # which is behind its share
        offset, num_bytes = tracks[direction].advance()
        priority = Priority.DEMAND if direction is Direction.READ else Priority.WRITE_BACK
        handle = Operation(self._scheduler, direction, self._extent, offset, memory[:num_bytes], priority)
        self._scheduler.submit(handle)
        self._under_way[handle] = memory
        handle.add_done_callback(self._over.put)


def _ranges(workload: Workload, num_bytes: int, request_bytes: int) -> dict[Direction, tuple[int, int]]:
    """Return the range of each direction. In a mixed workload each has one half: the same bytes would have to wait."""
    if workload is not Workload.MIXED:
        return {Direction.READ if workload is Workload.READ else Direction.WRITE: (0, num_bytes)}
    half = num_bytes // 2 // request_bytes * request_bytes
    return {Direction.READ: (0, half), Direction.WRITE: (half, num_bytes)}
