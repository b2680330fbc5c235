"""Positional I/O on the files of a volume, also where memory, offset or length are not aligned."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from swapper.backend import NO_MEMORY, Direction, IORequest, as_os_error
from swapper.config import ALIGNMENT, round_up
from swapper.memory.region import AlignedRegion
from swapper.volumes.volume import FileRange, Volume


class FileTransfer:
    """Carries out requests on the files of a volume, from any thread.

    [Note: bounced transfers]
    O_DIRECT moves whole, aligned blocks between aligned memory and aligned offsets. A request that is not like that
    goes through memory of the worker's own: a read fetches the blocks around it and copies its bytes out; a write
    first fetches the blocks at its two ends (unless it may destroy what else lies in them), copies its bytes in and
    writes whole blocks. The scheduler treats such blocks as touched by the request, so nobody else changes them
    meanwhile.

    [Note: runs] A request may be longer than what is asked of the kernel at a time. It is then carried out step by step, in
    one loop of this thread: for a step, all that Python does is a system call and a view.

    Args:
        volume: Where the bytes go.
        step_bytes: The most that is asked of the kernel at a time; a multiple of 4096. None: whole pieces.
    """

    def __init__(self, volume: Volume, step_bytes: int | None = None) -> None:
        self._files = volume.files
        self._step_bytes = step_bytes or sys.maxsize
        self._needs_alignment = any(file.is_direct for file in volume.files)
        self._bounce = threading.local()
        self._bounce_lock = threading.Lock()
        self.num_bounced = 0

    def __call__(
        self, request: IORequest, file_ranges: Sequence[FileRange], then: Callable[[int, OSError | None], object]
    ) -> None:
        """Carry out the file ranges of a request, one after the other.

        Args:
            request: What to do.
            file_ranges: Where some of its bytes lie, in their order.
            then: Called in the end, with the place in the request of the first byte that is not moved (the request's end if
                there is none), and with the error if nothing was moved at all.
        """
        memory, address, step = request.memory, request.address, self._step_bytes
        move = os.preadv if request.direction is Direction.READ else os.pwritev
        num_bytes = len(memory)
        done, has_moved, view, failure = 0, False, memory, None
        try:
            for column, offset, done, high in file_ranges:
                offset -= done
                fd = self._files[column].fd
                while done < high:
                    stop = min(done + step, high)
                    view = memory if stop - done == num_bytes else memory[done:stop]
                    if self._needs_alignment and ((offset + done) | (address + done) | len(view)) % ALIGNMENT:
                        moved = self._through_bounce(request, view, fd, offset + done)
                    else:
                        moved = move(fd, (view,), offset + done)
                    has_moved = has_moved or moved > 0
                    done += moved
                    if done < stop:
                        break
                if done < high:
                    break
            else:
                done = num_bytes
        except BaseException as error:
            if not has_moved:  # else the next attempt begins where this one has ended, and tells why
                failure = as_os_error(error)
        view = memory = NO_MEMORY  # before anybody hears that it is over
        then(done, failure)

    def _through_bounce(self, request: IORequest, memory: memoryview, fd: int, offset: int) -> int:
        """A piece of a request. See [Note: bounced transfers]."""
        with self._bounce_lock:
            self.num_bounced += 1
        num_bytes = len(memory)
        start = offset // ALIGNMENT * ALIGNMENT
        head = offset - start
        whole = round_up(head + num_bytes)
        blocks = self._bounce_memory(whole)
        if request.direction is Direction.READ:
            usable = min(num_bytes, os.preadv(fd, (blocks,), start) - head)
            if usable > 0:
                memory[:usable] = blocks[head : head + usable]
            return max(0, usable)
        if not request.may_pad:
            edges = {0} if head else set()
            if (head + num_bytes) % ALIGNMENT:
                edges.add(whole - ALIGNMENT)
            for edge in edges:
                block = blocks[edge : edge + ALIGNMENT]
                if os.preadv(fd, (block,), start + edge) != ALIGNMENT:
                    return 0
        blocks[head : head + num_bytes] = memory
        return max(0, min(num_bytes, os.pwritev(fd, (blocks,), start) - head))

    def _bounce_memory(self, num_bytes: int) -> memoryview:
        array: npt.NDArray[np.uint8] | None = getattr(self._bounce, "array", None)
        if array is None or array.size < num_bytes:
            array = AlignedRegion(num_bytes).array()
            self._bounce.array = array
        return array.data[:num_bytes]
