"""The test that io_uring must pass before it gets a model: bytes on a volume's own files, compared."""

from __future__ import annotations

import contextlib
import os
import queue

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest
from swapper.backends.uring.backend import UringBackend
from swapper.config import ALIGNMENT
from swapper.memory.region import AlignedRegion
from swapper.volumes.volume import Volume

TEST_BYTES = 4 * ALIGNMENT  # written to each file, and restored
_MAX_STRIPES = 1024  # to look through for one of each file
_TIMEOUT_SECONDS = 10.0  # of each transfer

Bytes = npt.NDArray[np.uint8]


def find_fault(backend: UringBackend) -> str:
    """Write and read a few blocks of each file through the ring, and check every byte by ordinary reads and writes.

    It does so with ordinary and with registered memory. The former contents of the files are restored.

    Returns:
        A description of the fault; empty if there is none.
    """
    region = AlignedRegion(2 * TEST_BYTES)  # one half to write from, the other to read into
    memory = region.array()
    for kind in ("ordinary", "registered"):
        with contextlib.ExitStack() as stack:
            if kind == "registered":
                stack.callback(backend.register_memory(region))
            for offset, num_bytes in _places(backend.volume):
                fault = _try_place(backend, offset, memory[:num_bytes], memory[TEST_BYTES : TEST_BYTES + num_bytes])
                if fault:
                    return f"its self-test with {kind} memory failed: {fault}"
    return ""


def _places(volume: Volume) -> list[tuple[int, int]]:
    """An address in each file, and how many bytes can be used there."""
    found: dict[int, tuple[int, int]] = {}
    num_bytes = min(volume.capacity_bytes, (volume.stripe_bytes or TEST_BYTES) * _MAX_STRIPES)
    for column, _, low, high in volume.file_ranges(0, num_bytes):
        if low < high:
            found.setdefault(column, (low, min(TEST_BYTES, high - low)))
    return list(found.values())


def _try_place(backend: UringBackend, offset: int, data: Bytes, copy: Bytes) -> str:
    file, file_offset = backend.volume.locate(offset)
    before = AlignedRegion(data.size).array()
    try:
        os.preadv(file.fd, [before.data], file_offset)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    random = np.random.default_rng(1)
    try:
        # Each direction is checked by an ordinary system call: a ring that writes to a wrong place, and reads from the
        # same one, would find its own bytes right.
        data[:] = random.integers(0, 256, data.size, np.uint8)
        fault = _transfer(backend, Direction.WRITE, offset, data)
        if not fault:
            os.preadv(file.fd, [copy.data], file_offset)
            fault = _compare(data, copy, f"written to {file.name}")
        if not fault:
            data[:] = random.integers(0, 256, data.size, np.uint8)
            os.pwritev(file.fd, [data.data], file_offset)
            copy[:] = 0
            fault = _transfer(backend, Direction.READ, offset, copy) or _compare(data, copy, f"read from {file.name}")
        return fault
    except OSError as error:
        return f"{file.name} cannot be used: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.pwritev(file.fd, [before.data], file_offset)


def _compare(expected: Bytes, found: Bytes, what: str) -> str:
    num_wrong = int((expected != found).sum())
    return f"{num_wrong} of {expected.size} bytes {what} differ" if num_wrong else ""


def _transfer(backend: UringBackend, direction: Direction, offset: int, array: Bytes) -> str:
    name, answer = direction.name.lower(), queue.SimpleQueue[tuple[int, OSError | None]]()
    address: int = array.__array_interface__["data"][0]
    backend.submit(IORequest(direction, offset, array.data, address, lambda _, *outcome: answer.put(outcome)))
    try:
        moved_bytes, error = answer.get(timeout=_TIMEOUT_SECONDS)
    except queue.Empty:
        return f"a {name} had no answer for {_TIMEOUT_SECONDS:g} seconds"
    if error is not None:
        return f"a {name} failed: {error}"
    return "" if moved_bytes == array.size else f"a {name} moved {moved_bytes} of {array.size} bytes"
