"""A window of requests that is kept full, for measurements."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from swapper.backend import Direction, IOBackend, register_memory
from swapper.config import Priority
from swapper.errors import WrongDataError
from swapper.extents.extent import Extent
from swapper.measure.borrowed import BorrowedVolume
from swapper.measure.io_setting import WindowSize, Workload
from swapper.measure.pattern import CheckedPattern, FileRange, Memory
from swapper.memory.region import AlignedRegion
from swapper.scheduling.handle import Handle
from swapper.scheduling.operation import Operation
from swapper.scheduling.scheduler import IOScheduler
from swapper.sync.interrupts import uninterrupted
from swapper.uncopyable import Uncopyable


class Track:
    """Knows where one direction goes on: through a range of the volume, and from its end back to its start.

    Args:
        start: First byte of the range.
        stop: The byte behind its last one.
        position: Where to go on, if that lies in the range.
        step_bytes: Length of a step; the one before the end may be shorter.
    """

    def __init__(self, start: int, stop: int, position: int, step_bytes: int) -> None:
        self._start = start
        self._stop = stop
        self._step_bytes = step_bytes
        self.position = start + max(0, position - start) // step_bytes * step_bytes
        self.issued_bytes = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the next step starts over."""
        return self.position >= self._stop

    def advance(self) -> tuple[int, int]:
        """Return offset and length of the next step."""
        offset = self._start if self.is_at_end else self.position
        num_bytes = min(self._step_bytes, self._stop - offset)
        self.position = offset + num_bytes
        self.issued_bytes += num_bytes
        return offset, num_bytes


@dataclass(slots=True)
class _Job:
    memory: Memory  # of a whole operation
    used: Memory
    ranges: list[FileRange]
    generation: int


class RequestWindow(Uncopyable):
    """Knows a fixed number of buffers and the reads and writes under way in them; must not know when to stop.

    Args:
        scheduler: Carries them out; closed by its owner.
        backend: Under the scheduler.
        volume: The files under the backend.
        pattern: What the files hold.
        size: What is under way at once.
        workload: What is done.
        checks_reads: Compare what is read with what was written.
    """

    def __init__(
        self,
        scheduler: IOScheduler,
        backend: IOBackend,
        volume: BorrowedVolume,
        pattern: CheckedPattern,
        size: WindowSize,
        workload: Workload,
        *,
        checks_reads: bool,
    ) -> None:
        self._scheduler = scheduler
        self._block_bytes = backend.block_bytes
        self._volume = volume
        self._pattern = pattern
        self._checks_reads = checks_reads
        self._extent = Extent("drive test", 0, volume.capacity_bytes, volume, is_prewritten=True)
        operation_bytes = size.operation_bytes
        region = AlignedRegion(operation_bytes * size.operations_for(workload))
        memory = region.array()
        pattern.fill(memory)
        register_memory(backend, region)  # as the engine does with its pages
        self._free = [memory[start : start + operation_bytes] for start in range(0, memory.size, operation_bytes)]
        self._jobs: dict[Handle, _Job] = {}
        self._over: queue.SimpleQueue[Handle] = queue.SimpleQueue()
        self.done_bytes = {Direction.READ: 0, Direction.WRITE: 0}

    @property
    def has_room(self) -> bool:
        """Whether a buffer is free."""
        return bool(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._jobs

    def issue(self, direction: Direction, track: Track) -> None:
        """Start the next operation of a track; there must be room."""
        offset, num_bytes = track.advance()
        memory = self._free.pop()
        job = _Job(memory, memory[:num_bytes], self._volume.ranges(offset, num_bytes), 0)
        priority = Priority.DEMAND
        if direction is Direction.WRITE:
            job.generation = self._pattern.mark(job.used, job.ranges)
            priority = Priority.WRITE_BACK
        operation = Operation(direction, self._extent, offset, job.used, priority, self._block_bytes)
        with uninterrupted():
            self._scheduler.submit(operation)
        handle = Handle(operation, self._scheduler)
        self._jobs[handle] = job
        handle.add_done_callback(self._over.put)

    def complete(self) -> None:
        """Wait until any operation is over.

        Raises:
            SwapperError: It failed.
            WrongDataError: It read something else than was written.
        """
        handle = self._over.get()
        job = self._jobs.pop(handle)
        error = handle.error
        if error is not None:
            raise error
        self._free.append(job.memory)
        if not handle.is_read:
            self._pattern.confirm(job.ranges, job.generation)
        elif self._checks_reads:
            self._check(job)
        self.done_bytes[Direction.READ if handle.is_read else Direction.WRITE] += handle.num_bytes

    def _check(self, job: _Job) -> None:
        mismatch = self._pattern.check(job.used, job.ranges)
        if mismatch is not None:
            raise WrongDataError(self._volume.files[mismatch.file_index].name, mismatch.offset, mismatch.detail)
