"""Positional I/O on worker threads, past the page cache: the default for drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, starmap
from queue import SimpleQueue

from swapper.backend import Batch, IORequest, Step, ended
from swapper.backends.volume_backend import VolumeBackend
from swapper.backends.workers import start_workers, stop_workers
from swapper.config import ALIGNMENT
from swapper.volumes.volume import FileRange, Volume

# Limits of one transfer, which may be several requests. A demand read waits at most about as long as a transfer ahead
# of it takes: 64 MiB are 110 ms of a drive with 600 MB/s.
_MOST_REQUESTS = 64
_MOST_BYTES = 64 << 20
_go_through = deque[object](maxlen=0).extend  # an iterator, in one step; keeps nothing


class ThreadsBackend(VolumeBackend):
    """A volume and the threads that transfer its bytes.

    Each file has threads of its own for each direction. So a slow or hung drive never occupies the threads of another,
    and slow writes never those of reads. A long transfer is spread over all threads of its files.

    Args:
        volume: Where the bytes go; closed together with the backend.
        num_threads: Worker threads for each direction and file.
        request_bytes: The most that a thread asks of the kernel at a time; a multiple of 4096. None: whole transfers.
    """

    def __init__(self, volume: Volume, num_threads: int = 4, request_bytes: int | None = None) -> None:
        super().__init__(volume, num_threads)
        self.boundary_bytes = 0  # transfers may cross stripes: _spread() divides them
        self._request_bytes = request_bytes or volume.capacity_bytes
        # See `IOBackend`. Requests of 64 KiB give 4 MiB, of 1 MiB and 8 MiB 64 MiB, of 128 MiB 128 MiB.
        self.run_bytes = max(request_bytes or 0, min(_MOST_REQUESTS * (request_bytes or 0), _MOST_BYTES))
        num_files = len(volume.files)
        # Operations visit the drives in turn, and drives differ in speed. Without some transfers in reserve, the
        # threads of a fast drive would idle until the scheduler comes to its next stripe.
        num_ahead = -(-num_threads // 2) if num_files > 1 else 0
        self.concurrency = (num_threads + num_ahead) * num_files
        self._workers = start_workers("io", num_threads, num_files)
        self._is_one_file = num_files == 1

    def describe(self) -> str:
        """Return one line for logs."""
        return f"threads: {self.describe_threads()}"

    def submit(self, request: IORequest) -> None:
        """Hand the request, or its parts, to worker threads of its files."""
        step = self.step_of(request)
        if step is None:
            request.complete(0, ended("the worker threads have"))
        else:
            put, job = step
            put(job)

    def step_of(self, request: IORequest) -> Step | None:
        """See `IOBackend`."""
        offset, num_bytes = request.offset, len(request.memory)
        file_ranges = [(0, offset, 0, num_bytes)] if self._is_one_file else self.volume.file_ranges(offset, num_bytes)
        then = partial(request.on_complete, request)
        if len(file_ranges) == 1 and num_bytes <= self._request_bytes:
            workers = self._workers[2 * file_ranges[0][0] + request.direction]
            return None if workers.is_closed else (workers.jobs.put, partial(self.transfer, request, file_ranges, then))
        parts = self._spread(file_ranges)
        # A part is named by its first byte, counted in the request.
        batch, jobs = Batch({part[0][2] for part in parts}, num_bytes, then, request), []
        for part in parts:
            workers = self._workers[2 * part[0][0] + request.direction]
            if workers.is_closed:
                return None
            jobs.append((workers.jobs, partial(self.transfer, request, part, batch)))
        return _go_through, starmap(SimpleQueue.put, jobs)

    def _spread(self, file_ranges: Sequence[FileRange]) -> list[Sequence[FileRange]]:
        """Deal the ranges to the threads of each file, in pieces of at most a request."""
        # Two equal drives, 4 threads each, 16 MiB in stripes of 1 MiB: 8 ranges for each file, 2 of them in each of 8
        # parts. 10 MiB on one drive, requests of 1 MiB: 10 pieces, and the threads get 3, 3, 3 and 1 of them.
        step = self._request_bytes
        by_file: dict[int, list[FileRange]] = {}
        for file_range in file_ranges:
            column, offset, low, high = file_range
            mine = by_file.setdefault(column, [])
            if high - low <= step:
                mine.append(file_range)
            else:  # cuts are at whole blocks: only the two ends of a request may be unaligned, and bounced
                cuts = [low, *range(low + step - offset % ALIGNMENT, high, step), high]
                mine += [(column, offset + start - low, start, stop) for start, stop in pairwise(cuts)]
        parts: list[Sequence[FileRange]] = []
        # 4 MiB from byte 100 on, requests of 1 MiB: 5 pieces, of which the last has 100 bytes. It is not counted, or 4
        # threads would get 2, 2 and 1 of them, and one none.
        is_unaligned = file_ranges[0][1] % ALIGNMENT > 0
        for mine in by_file.values():
            share = max(1, -(-(len(mine) - is_unaligned) // self.num_threads))
            for start in range(0, len(mine), share):
                parts.append(mine[start : start + share])
        return parts

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the workers and leave the files open for another backend; return whether all ended in time."""
        return stop_workers(self._workers, timeout_seconds)
