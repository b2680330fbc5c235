"""What io_uring must prove before anybody trusts it with a model: bytes on a volume's own files, compared."""

from __future__ import annotations

import contextlib
import os

from swapper.backend import Direction
from swapper.backends.uring.backend import UringBackend
from swapper.config import ALIGNMENT
from swapper.memory.region import AlignedRegion
from swapper.testing.conformance import Bytes, random_bytes, start
from swapper.volumes.volume import Volume

TEST_BYTES = 4 * ALIGNMENT
"""So much of each file is written to."""
_MAX_STRIPES = 1024  # to look through for one of each file
_TIMEOUT_SECONDS = 10.0


def find_fault(backend: UringBackend) -> str:
    """Write and read a few blocks of each file through the ring, and check every byte by ordinary reads and writes.

    Once with ordinary and once with registered memory, as far as memory can be registered. What lay in the files is put
    back.

    Returns:
        What went wrong, in words; nothing if all is well.
    """
    region = AlignedRegion(2 * TEST_BYTES)
    memory = region.array()
    for is_registered in (False, True):
        give_back = backend.register_memory(region) if is_registered else None
        try:
            for offset, num_bytes in _places(backend.volume):
                fault = _try_place(backend, offset, memory[:num_bytes], memory[TEST_BYTES : TEST_BYTES + num_bytes])
                if fault:
                    path = "registered" if is_registered else "ordinary"
                    return f"its self-test with {path} memory failed: {fault}"
        finally:
            if give_back is not None:
                give_back()
    return ""


def _places(volume: Volume) -> list[tuple[int, int]]:
    """An address in each file, and how many bytes can be used there."""
    found: dict[int, tuple[int, int]] = {}
    step = volume.stripe_bytes or volume.capacity_bytes or 1
    for offset in range(0, min(volume.capacity_bytes, step * _MAX_STRIPES), step):
        column = volume.column_of(offset)
        if column not in found:
            found[column] = (offset, min(TEST_BYTES, volume.capacity_bytes - offset, step))
        if len(found) == len(volume.files):
            break
    return list(found.values())


def _try_place(backend: UringBackend, offset: int, data: Bytes, copy: Bytes) -> str:
    file, file_offset = backend.volume.locate(offset)
    before = AlignedRegion(data.size).array()
    try:
        os.preadv(file.fd, [before.data], file_offset)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    try:
        data[:] = random_bytes(data.size, 1)
        fault = _transfer(backend, Direction.WRITE, offset, data)
        if not fault:
            os.preadv(file.fd, [copy.data], file_offset)
            fault = _compare(data, copy, f"written to {file.name}")
        if not fault:
            data[:] = random_bytes(data.size, 2)
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
    completion, name = start(backend, direction, offset, array), direction.name.lower()
    if not completion.is_over.wait(_TIMEOUT_SECONDS):
        return f"a {name} had no answer for {_TIMEOUT_SECONDS:g} seconds"
    if completion.error is not None:
        return f"a {name} failed: {completion.error}"
    is_whole = completion.transferred_bytes == array.size
    return "" if is_whole else f"a {name} moved {completion.transferred_bytes} of {array.size} bytes"
