"""Positional I/O on the files of a volume, also where memory, offset or length are not aligned; and what all backends that
use it have in common."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swapper.backend import NO_MEMORY, Batch, Direction, EndCallback, IORequest, as_os_error
from swapper.config import ALIGNMENT, round_up
from swapper.memory.region import AlignedRegion
from swapper.uncopyable import Uncopyable
from swapper.volumes.volume import FileRange, Volume

logger = logging.getLogger(__name__)


class VolumeBackend(Uncopyable):
    """A volume, which it closes, and positional transfers of its bytes, from any thread.

    [Note: bounced transfers]
    O_DIRECT moves whole, aligned blocks between aligned memory and aligned offsets. Any other request goes through
    memory of the worker's own. A read fetches the blocks around it and copies its bytes out. A write first fetches the
    blocks at its two ends. It then copies its bytes in and writes whole blocks. No other request changes these blocks
    meanwhile: the scheduler counts them as touched.

    [Note: runs] A request may be longer than what is asked of the kernel at a time. It then has many file ranges, which
    one loop of this thread carries out, each with one view and one system call.
    """

    def __init__(self, volume: Volume, num_threads: int = 0) -> None:
        """
        Args:
            volume: Where the bytes go; closed together with the backend.
            num_threads: Worker threads for each direction and file.
        """
        self.volume = volume
        self.num_threads = num_threads
        self.capacity_bytes = volume.capacity_bytes
        self.is_direct = volume.is_direct
        # Direct writes go in whole blocks, see [Note: bounced transfers]. One direct file is enough.
        self.block_bytes = ALIGNMENT if any(file.is_direct for file in volume.files) else 1
        self.boundary_bytes = volume.stripe_bytes
        # Each worker's buffer: as large as its largest bounced step, kept until it ends.
        self._bounce = threading.local()
        self._bounce_lock = threading.Lock()  # guards num_bounced
        self.num_bounced = 0

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the file's description and the offset in it."""
        file, file_offset = self.volume.locate(offset)
        return file.name, file_offset

    def describe_threads(self) -> str:
        """Return the volume and the worker threads, for logs."""
        each = " of each file" if len(self.volume.files) > 1 else ""
        threads = f"{self.num_threads} threads for reads and {self.num_threads} for writes{each}"
        return f"{self.volume.describe()}, {threads}"

    def stop(self, timeout_seconds: float) -> bool:
        """End the threads and leave the files open for another backend; return whether all ended in time."""
        raise NotImplementedError

    def close(self, timeout_seconds: float) -> bool:
        """Let what was submitted end, stop the threads and close the files; return whether all ended in time."""
        has_ended = self.stop(timeout_seconds)
        if has_ended:
            self.volume.close()
        else:
            # The number of a closed file may be given to another file, which a hung transfer would then write into.
            logger.error("a transfer hangs; leaving the files open: %s", self.volume.describe())
        return has_ended

    def transfer(self, request: IORequest, file_ranges: Sequence[FileRange], then: EndCallback | Batch) -> None:
        """Carry out the file ranges of a request, one after the other.

        Args:
            request: What to do.
            file_ranges: Where some of its bytes lie, in their order.
            then: Called at the end. Or the batch of which these file ranges are a part, named by their first byte.
        """
        memory, address, first, files = request.memory, request.address, file_ranges[0][2], self.volume.files
        move = os.preadv if request.direction is Direction.READ else os.pwritev
        num_bytes = len(memory)
        done, view, failure = first, memory, None
        try:
            for column, offset, done, high in file_ranges if num_bytes else ():
                fd = files[column].fd
                view = memory if high - done == num_bytes else memory[done:high]
                # The OR of three numbers is a multiple of 4096, a power of two, only if each of them is.
                if self.block_bytes > 1 and (offset | (address + done) | len(view)) % ALIGNMENT:
                    done += self._through_bounce(request, view, fd, offset)
                else:
                    done += move(fd, (view,), offset)
                if done < high:  # a short transfer: the scheduler decides whether the rest is tried again
                    break
            else:
                done = num_bytes
        except BaseException as error:
            if done == first:  # else this counts as short; the next attempt begins here and meets the same error
                failure = as_os_error(error)
        view = memory = NO_MEMORY  # before `then`: a buffer of the user with views cannot be resized, and may be reused
        if not isinstance(then, Batch):
            then(done, failure)
        elif done < num_bytes:
            then.on_over(first, done, failure)
        else:  # as `on_over`, whose call only the last part needs
            then.left.discard(first)
            if not next(then.countdown):
                then.end()

    def _through_bounce(self, request: IORequest, memory: memoryview, fd: int, offset: int) -> int:
        """A piece of a request. See [Note: bounced transfers]."""
        with self._bounce_lock:
            self.num_bounced += 1
        # Example: 5000 bytes at offset 6000. start = 4096, head = 1904, whole = 8192: the blocks at 4096 and 8192. A
        # write reads both first, puts its bytes at [1904, 6904) of the buffer, and writes 8192 bytes at 4096.
        num_bytes = len(memory)
        start = offset // ALIGNMENT * ALIGNMENT
        head = offset - start
        whole = round_up(head + num_bytes)
        blocks = self._bounce_memory(whole)
        if request.direction is Direction.READ:
            usable = min(num_bytes, os.preadv(fd, (blocks,), start) - head)  # negative if it ended within the head
            if usable > 0:
                memory[:usable] = blocks[head : head + usable]
            return max(0, usable)
        edges = {0} if head else set()
        if (head + num_bytes) % ALIGNMENT:
            edges.add(whole - ALIGNMENT)  # a set: both ends may be in one block
        for edge in edges:
            block = blocks[edge : edge + ALIGNMENT]
            if os.preadv(fd, (block,), start + edge) != ALIGNMENT:
                return 0  # a short transfer of nothing: going on would write zeros over the other bytes
        blocks[head : head + num_bytes] = memory
        return max(0, min(num_bytes, os.pwritev(fd, (blocks,), start) - head))

    def _bounce_memory(self, num_bytes: int) -> memoryview:
        array: npt.NDArray[np.uint8] | None = getattr(self._bounce, "array", None)
        if array is None or array.size < num_bytes:
            array = AlignedRegion(num_bytes).array()
            self._bounce.array = array
        return array.data[:num_bytes]
