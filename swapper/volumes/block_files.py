"""Large files that are written or read once, from front to end, in blocks, with direct I/O.

A few threads each transfer a block at a time, so memory is that of the blocks. Written files still have to be synced:
see ``swapper.volumes.publish``.
"""

from __future__ import annotations

import errno
import os
import shutil
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
from swapper.volumes.scratch_file import reserve_space, write_all
from swapper.volumes.thread_pool import ThreadPool

Bytes = npt.NDArray[np.uint8]


class BlockFile:
    """One open file, with a count of its users: its owner, and each block on its way. The last `release` closes it."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        """
        Args:
            path: which file.
            num_bytes: make it, and reserve this space for it; None: read an existing file.

        Raises:
            OSError: it cannot be opened, or there is no room.
        """
        self.path = path
        self._lock = threading.Lock()  # guards _num_users
        self._num_users = 1
        self._fd = _open(path, os.O_RDONLY if num_bytes is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if num_bytes:
            with closed_unless_made(self.release):
                reserve_space(self._fd, num_bytes, otherwise=lambda: os.ftruncate(self._fd, num_bytes))

    def use(self) -> None:
        """Keep it open until `release`."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """End a `use`, or the owner's use of it."""
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
    """Threads and memory for blocks. A context manager whose end waits for all transfers."""

    def __init__(self, block_bytes: int, num_threads: int = 8) -> None:
        """``block_bytes``: the largest block; rounded up to a multiple of 4096."""
        self.block_bytes = round_up(block_bytes, ALIGNMENT)
        self._pool = ThreadPool(num_threads)
        self._num_threads = num_threads
        # Blocks are made on demand and reused. write() lets at most num_threads be on their way, and the caller fills
        # one more; reads are limited by their caller.
        self._free: list[Bytes] = []
        self._writes: deque[Future[None]] = deque()

    def close(self) -> None:
        """Wait for all transfers, and release the memory."""
        self._pool.close()
        self._free.clear()  # each block is unmapped when the last array over it is gone

    def acquire_block(self) -> Bytes:
        """Return memory for a block, with undefined contents. The caller owns it until `write` or `release_block`."""
        try:
            return self._free.pop()
        except IndexError:
            return AlignedRegion(self.block_bytes).array()  # the array keeps the memory

    def release_block(self, block: Bytes) -> None:
        """Give a block of `acquire_block` or `read` back."""
        self._free.append(block)

    def write(self, file: BlockFile, block: Bytes, num_bytes: int, offset: int, prepare: Callable[[], None]) -> None:
        """Start to call ``prepare`` and write the first bytes of a block; first wait while too many writes are running.

        Raises:
            OSError: this or an earlier one could not be written.
        """
        while len(self._writes) >= self._num_threads:
            self._writes.popleft().result()
        file.use()

        def run() -> None:  # prepare() computes a checksum, say: on the worker, beside other transfers
            try:
                prepare()
                file.write(block[:num_bytes], offset)
            finally:
                file.release()
                self._free.append(block)

        self._writes.append(self._pool.submit(run))

    def finish(self) -> None:
        """Wait until all is written; raise OSError if something was not."""
        while self._writes:
            self._writes.popleft().result()

    def read(self, file: BlockFile, num_bytes: int, offset: int, check: Callable[[Bytes], None]) -> Future[Bytes]:
        """Start to read a block and call ``check`` with its bytes; the result is its memory, of ``block_bytes``."""
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
    """Return the free bytes for this user in the file system of a directory, which need not exist yet.

    For a file system that reports no sizes (some FUSE ones) this is ``sys.maxsize``.
    """
    while not directory.exists():
        directory = directory.parent
    usage = shutil.disk_usage(directory)
    return usage.free if usage.total else sys.maxsize
