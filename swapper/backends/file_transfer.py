"""Positional I/O on the files of a volume, also where memory, offset or length are not aligned."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest
from swapper.config import ALIGNMENT, round_up
from swapper.memory.region import AlignedRegion
from swapper.volumes.volume import Volume


class FileTransfer:
    """Carries out requests on the files of a volume, from any thread.

    [Note: bounced transfers]
    O_DIRECT moves whole, aligned blocks between aligned memory and aligned offsets. A request that is not like that
    goes through memory of the worker's own: a read fetches the blocks around it and copies its bytes out; a write
    first fetches the blocks at its two ends (unless it may destroy what else lies in them), copies its bytes in and
    writes whole blocks. The scheduler treats such blocks as touched by the request, so nobody else changes them
    meanwhile.

    [Note: runs] A request may be longer than what is asked of the kernel at a time. It is then carried out piece by piece, in
    one loop of this thread: for a piece, all that Python does is a system call and a view.

    Args:
        volume: Where the bytes go.
        piece_bytes: The most that is asked of the kernel at a time; a multiple of 4096. None: whole requests.
    """

    def __init__(self, volume: Volume, piece_bytes: int | None = None) -> None:
        self._volume = volume
        self._piece_bytes = piece_bytes
        self._needs_alignment = any(file.is_direct for file in volume.files)
        self._bounce = threading.local()
        self._bounce_lock = threading.Lock()
        self.num_bounced = 0

    def __call__(self, request: IORequest) -> int:
        file, offset = self._volume.locate(request.offset)
        fd, memory, address, done = file.fd, request.memory, request.address, 0
        move = os.preadv if request.direction is Direction.READ else os.pwritev
        num_bytes = len(memory)
        step = min(self._piece_bytes or num_bytes, num_bytes)
        while True:
            piece = memory if step == num_bytes else memory[done : done + step]
            try:
                if self._needs_alignment and ((offset + done) | (address + done) | len(piece)) % ALIGNMENT:
                    moved = self._through_bounce(request, piece, fd, offset + done)
                else:
                    moved = move(fd, (piece,), offset + done)
            except OSError:
                if not done:
                    raise
                return done  # the next attempt begins here, and tells why
            done += moved
            if done >= num_bytes or moved < len(piece):
                return done

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
