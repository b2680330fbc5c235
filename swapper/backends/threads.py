"""Positional I/O on worker threads, past the page cache: the default for drives."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import numpy.typing as npt

from swapper.backends.base import Direction, IORequest
from swapper.backends.workers import WorkerPool
from swapper.config import ALIGNMENT, round_up
from swapper.region import AlignedRegion
from swapper.uncopyable import Uncopyable
from swapper.volume import Volume

logger = logging.getLogger(__name__)


class _FileTransfer:
    """Carries out requests on the files of a volume, from any thread.

    [Note: bounced transfers]
    O_DIRECT moves whole, aligned blocks between aligned memory and aligned offsets. A request that is not like that
    goes through memory of the worker's own: a read fetches the blocks around it and copies its bytes out; a write
    first fetches the blocks at its two ends (unless it may destroy what else lies in them), copies its bytes in and
    writes whole blocks. The scheduler treats such blocks as touched by the request, so nobody else changes them
    meanwhile.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._needs_alignment = any(file.is_direct for file in volume.files)
        self._bounce = threading.local()
        self._bounce_lock = threading.Lock()
        self.num_bounced = 0

    def __call__(self, request: IORequest) -> int:
        file, offset = self._volume.locate(request.offset)
        memory = request.memory
        if self._needs_alignment and (offset | request.address | len(memory)) % ALIGNMENT:
            return self._through_bounce(request, file.fd, offset)
        if request.direction is Direction.READ:
            return os.preadv(file.fd, (memory,), offset)
        return os.pwritev(file.fd, (memory,), offset)

    def _through_bounce(self, request: IORequest, fd: int, offset: int) -> int:
        """See [Note: bounced transfers]."""
        with self._bounce_lock:
            self.num_bounced += 1
        num_bytes = len(request.memory)
        start = offset // ALIGNMENT * ALIGNMENT
        head = offset - start
        whole = round_up(head + num_bytes)
        blocks = self._bounce_memory(whole)
        if request.direction is Direction.READ:
            usable = min(num_bytes, os.preadv(fd, (blocks,), start) - head)
            if usable > 0:
                request.memory[:usable] = blocks[head : head + usable]
            return max(0, usable)
        if not request.may_pad:
            edges = {0} if head else set()
            if (head + num_bytes) % ALIGNMENT:
                edges.add(whole - ALIGNMENT)
            for edge in edges:
                block = blocks[edge : edge + ALIGNMENT]
                if os.preadv(fd, (block,), start + edge) != ALIGNMENT:
                    return 0
        blocks[head : head + num_bytes] = request.memory
        return max(0, min(num_bytes, os.pwritev(fd, (blocks,), start) - head))

    def _bounce_memory(self, num_bytes: int) -> memoryview:
        array: npt.NDArray[np.uint8] | None = getattr(self._bounce, "array", None)
        if array is None or array.size < num_bytes:
            array = AlignedRegion(num_bytes).array()
            self._bounce.array = array
        return array.data[:num_bytes]


class ThreadsBackend(Uncopyable):
    """Knows a volume and the threads that transfer its bytes; must not know extents.

    Args:
        volume: Where the bytes go; closed together with the backend.
        num_threads: Worker threads for each direction.
    """

    def __init__(self, volume: Volume, num_threads: int = 4) -> None:
        self.volume = volume
        self.capacity_bytes = volume.capacity_bytes
        self.is_direct = volume.is_direct
        self.block_bytes = ALIGNMENT if any(file.is_direct for file in volume.files) else 1
        self.boundary_bytes = volume.stripe_bytes
        self.concurrency = num_threads
        self._transfer = _FileTransfer(volume)
        self._pool = WorkerPool("io", self._transfer, num_threads)

    @property
    def num_bounced(self) -> int:
        """Transfers that went through other memory, because theirs was not aligned."""
        return self._transfer.num_bounced

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the file's description and the offset in it."""
        file, file_offset = self.volume.locate(offset)
        return file.name, file_offset

    def describe(self) -> str:
        """Return one line for logs."""
        return (
            f"threads: {self.volume.describe()}, {self.concurrency} threads for reads and {self.concurrency} for writes"
        )

    def submit(self, request: IORequest) -> None:
        """Hand the request to a worker thread."""
        self._pool.submit(request)

    def close(self, timeout_seconds: float) -> bool:
        """Stop the workers and close the files."""
        ended = self._pool.close(timeout_seconds)
        if ended:
            self.volume.close()
        else:
            # The number of a closed file may be given to another file, which a hung thread would then write into.
            logger.error("a transfer hangs; leaving the files open: %s", self.volume.describe())
        return ended
