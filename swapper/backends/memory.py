"""The backend that stores bytes in host memory: the reference for the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest, ended
from swapper.backends.workers import start_workers, stop_workers
from swapper.config import round_up
from swapper.errors import ArgumentError
from swapper.memory.region import AlignedRegion
from swapper.uncopyable import Uncopyable, closed_unless_made


def _copy(region: npt.NDArray[np.uint8], request: IORequest) -> None:
    """Copy between a request's memory and the region."""
    memory = np.frombuffer(request.memory, dtype=np.uint8)  # numpy copies without the interpreter's lock
    stored = region[request.offset : request.offset + memory.size]
    if request.direction is Direction.READ:
        memory[: stored.size] = stored
    else:
        stored[:] = memory[: stored.size]
    del memory  # before completion: the user's buffer must have no views left
    request.complete(stored.size)


class MemoryBackend(Uncopyable):
    """One region of host memory.

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
        with closed_unless_made(self.region.release):
            self._workers = start_workers("memory", num_threads) if num_threads else []
        self._copy: Callable[[IORequest], None] | None = partial(_copy, self.region.array())

    def locate(self, offset: int) -> tuple[str, int]:
        """Return words for host memory, and the offset itself."""
        return "host memory", offset

    def describe(self) -> str:
        """Return one line for logs."""
        return f"memory: {self.capacity_bytes} bytes of host memory"

    def submit(self, request: IORequest) -> None:
        """Copy the bytes, here or on a worker thread."""
        if self._copy is None:
            request.complete(0, ended("the memory backend has"))
        elif not self._workers:
            self._copy(request)
        elif not self._workers[request.direction].submit(partial(self._copy, request)):
            request.complete(0, ended("the worker threads have"))

    def close(self, timeout_seconds: float) -> bool:
        """Stop the workers and give the memory back."""
        self._copy = None
        self.region.release()  # the mapping lives until queued copies, which hold its array, have ended
        return stop_workers(self._workers, timeout_seconds)
