"""Large files that are written or read once, from front to end, in blocks that go past the page cache.

A few blocks are under way at a time, each in a thread, so that a drive has enough to do; memory is that of the blocks. What
was written still has to be synced: see ``swapper.volumes.publish``.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swapper.config import ALIGNMENT, round_up
from swapper.memory.region import AlignedRegion
from swapper.uncopyable import Closable, closed_unless_made
from swapper.volumes.scratch_file import extend, write_all
from swapper.volumes.thread_pool import ThreadPool

Bytes = npt.NDArray[np.uint8]


class BlockFile:
    """One open file. It is closed when its owner and all blocks under way have released it."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        """
        Args:
            path: which file.
            num_bytes: make it, and reserve so many bytes for it; None: it is there, and is read.

        Raises:
            OSError: it cannot be opened, or there is no room.
        """
        self.path = path
        self._lock = threading.Lock()
        self._num_users = 1
        self._fd = _open(path, os.O_RDONLY if num_bytes is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if num_bytes:
            with closed_unless_made(self.release):
                extend(self._fd, num_bytes)

    def use(self) -> None:
        """Keep it open until `release`."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """The counterpart of `use`, and of making it."""
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            os.close(self._fd)

    def write(self, data: Bytes, offset: int) -> None:
        """Write all of ``data``; its address and size, and the offset, are multiples of 4096."""
        write_all(self._fd, data.data, offset)

    def read(self, target: Bytes, offset: int) -> None:
        """Fill ``target``; its address and size, and the offset, are multiples of 4096.

        Raises:
            EOFError: the file is shorter.
        """
        view = target.data
        while view:
            done = os.preadv(self._fd, [view], offset)
            if not done:
                raise EOFError(f"'{self.path}' ends at byte {offset}, in the middle of a block")
            view, offset = view[done:], offset + done


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)  # the file system has no direct I/O


class BlockThreads(Closable):
    """Threads and memory for blocks. A context manager: in its end nothing is under way any more."""

    def __init__(self, block_bytes: int, num_threads: int = 8) -> None:
        """``block_bytes``: the largest block; rounded up to a multiple of 4096."""
        self.block_bytes = round_up(block_bytes, ALIGNMENT)
        self._pool = ThreadPool(num_threads)
        self._num_threads = num_threads
        self._free: list[Bytes] = []
        self._regions: list[AlignedRegion] = []
        self._writes: deque[Future[None]] = deque()

    def close(self) -> None:
        """Return when nothing is under way, and release the memory."""
        self._pool.close()
        self._free.clear()
        self._regions.clear()  # each goes when nobody looks at it

    def acquire_block(self) -> Bytes:
        """Memory for a block, with whatever was in it; for the caller until he gives it to `write` or `release_block`."""
        try:
            return self._free.pop()
        except IndexError:
            region = AlignedRegion(self.block_bytes)
            self._regions.append(region)
            return region.array()

    def release_block(self, block: Bytes) -> None:
        """The counterpart of `acquire_block`."""
        self._free.append(block)

    def write(self, file: BlockFile, block: Bytes, num_bytes: int, offset: int, prepare: Callable[[], None]) -> None:
        """Start to write the first bytes of a block, after ``prepare``; returns when few enough blocks are under way.

        Raises:
            OSError: this or an earlier one could not be written.
        """
        while len(self._writes) >= self._num_threads:
            self._writes.popleft().result()
        file.use()

        def run() -> None:
            try:
                prepare()
                file.write(block[:num_bytes], offset)
            finally:
                file.release()
                self._free.append(block)

        self._writes.append(self._pool.submit(run))

    def finish(self) -> None:
        """Return when all is written; raises OSError if something was not."""
        while self._writes:
            self._writes.popleft().result()

    def read(self, file: BlockFile, num_bytes: int, offset: int, check: Callable[[Bytes], None]) -> Future[Bytes]:
        """Start to read a block; the result is its memory, of ``block_bytes``, after ``check`` has seen what was read."""
        block = self.acquire_block()
        file.use()

        def run() -> Bytes:
            try:
                file.read(block[:num_bytes], offset)
                check(block[:num_bytes])
                return block
            finally:
                file.release()

        with closed_unless_made(file.release):
            return self._pool.submit(run)


def free_bytes(directory: Path) -> int:
    """What the file system of a directory, which need not be there yet, has free for this user.

    A file system that reports no sizes (some FUSE ones) has no limit that anybody knows.
    """
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize
