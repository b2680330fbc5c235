"""Large arrays that need no memory of their own: bytes of files, looked at through the page cache.

What is written to such an array stays in this process (a private mapping), so it behaves like any array. Its pages can be
dropped and read again by the kernel, as those of a program's code: they are no part of what a process cannot do without. Nor is
memory set aside for them: else the kernel would refuse a file that is larger than all of it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swapper.errors import VolumeError
from swapper.memory.mapping import map_memory, owned_array, unmap
from swapper.uncopyable import closed_unless_made
from swapper.volumes.scratch_file import extend, open_nameless, write_all

_PRIVATE = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, on all of Linux but Alpha, MIPS and PA-RISC


class MappedFile:
    """One file of a fixed size: written once, then given out as an array. It goes when that does.

    Raises:
        OSError, VolumeError: there is no room in the directory, or it cannot be written to.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._fd = open_nameless(directory)
        with closed_unless_made(self.close):
            extend(self._fd, num_bytes)

    def write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Put bytes at an offset."""
        write_all(self._fd, data.data, offset)

    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, 1-D and writable; what is written reaches nobody else. To be called once, in the end."""
        array = _map(self._fd, self._num_bytes)
        self.close()
        return array

    def close(self) -> None:
        """Give the file up, unless an array looks at it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _map(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """All bytes of a file; the mapping keeps it."""
    address = map_memory(num_bytes, _PRIVATE, fd)
    return owned_array(address, num_bytes, unmap, address, num_bytes)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file that somebody else wrote, 1-D and writable; what is written reaches nobody else, nor the file.

    Raises:
        OSError: it cannot be opened or looked at.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if not num_bytes:
            return np.empty(0, dtype=np.uint8)
        return _map(file.fileno(), num_bytes)


@contextmanager
def mapped_file(directories: Sequence[Path], num_bytes: int) -> Iterator[MappedFile | None]:
    """A new file in the first directory that has room for it, or None; closed when the ``with`` block ends."""
    found: MappedFile | None = None
    for directory in directories:
        try:
            found = MappedFile(directory, num_bytes)
            break
        except (OSError, VolumeError):
            continue
    try:
        yield found
    finally:
        if found is not None:
            found.close()
