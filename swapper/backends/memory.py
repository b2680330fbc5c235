"""The backend whose bytes lie in host memory: the reference for the others, and the host tier."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest
from swapper.backends.workers import Transfer, WorkerPool
from swapper.config import round_up
from swapper.errors import ArgumentError
from swapper.memory.region import AlignedRegion
from swapper.uncopyable import Uncopyable, closed_unless_made


def _copy(region: npt.NDArray[np.uint8], request: IORequest) -> int:
    """Copy between a request's memory and the region; numpy lets other threads run meanwhile."""
    memory = np.frombuffer(request.memory, dtype=np.uint8)
    stored = region[request.offset : request.offset + memory.size]
    if request.direction is Direction.READ:
        memory[: stored.size] = stored
    else:
        stored[:] = memory[: stored.size]
    return stored.size


class MemoryBackend(Uncopyable):
    """Knows one region of host memory; must not know extents.

    Args:
        capacity_bytes: Size of the region, rounded up to 4096.
        num_threads: Copying threads per direction; 0 copies inside ``submit``, on the caller's thread.
    """

    block_bytes = 1
    boundary_bytes = 0
    is_direct = False
    num_bounced = 0

    def __init__(self, capacity_bytes: int, num_threads: int = 0) -> None:
        if capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes cannot be negative, got {capacity_bytes}")
        self.capacity_bytes = round_up(capacity_bytes)
        self.region = AlignedRegion(max(1, self.capacity_bytes))
        self.concurrency = max(1, num_threads)
        self._transfer: Transfer | None = functools.partial(_copy, self.region.array())
        with closed_unless_made(self.region.release):
            self._pool = WorkerPool("memory", self._transfer, num_threads) if num_threads else None

    def locate(self, offset: int) -> tuple[str, int]:
        """Return words for host memory, and the offset itself."""
        return "host memory", offset

    def describe(self) -> str:
        """Return one line for logs."""
        return f"memory: {self.capacity_bytes} bytes of host memory"

    def submit(self, request: IORequest) -> None:
        """Copy the bytes, here or on a worker thread."""
        if self._pool is not None:
            self._pool.submit(request)
        elif self._transfer is None:
            request.complete(0, OSError(None, "the memory backend is closed"))
        else:
            request.complete(self._transfer(request), None)

    def close(self, timeout_seconds: float) -> bool:
        """Stop the workers and give the memory back."""
        ended = self._pool.close(timeout_seconds) if self._pool is not None else True
        self._pool = None
        self._transfer = None
        self.region.release()
        return ended
