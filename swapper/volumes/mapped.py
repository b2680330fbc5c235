"""Large arrays that need no memory of their own: private mappings of files.

Writes to such an array stay in this process, so it behaves like any array. The kernel can drop its unchanged pages and
read them again, like those of a program's code.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swapper.errors import VolumeError
from swapper.memory.mapping import map_memory, owned_array, unmap
from swapper.uncopyable import closed_unless_made
from swapper.volumes.scratch_file import open_nameless, reserve_space, write_all

# 0x4000 is MAP_NORESERVE, on all of Linux but Alpha, MIPS and PA-RISC. Without it, the kernel reserves memory for a
# copy of each page, and refuses a file that is larger than all memory.
_PRIVATE = mmap.MAP_PRIVATE | 0x4000


class MappedFile:
    """One file of a fixed size: written once, then returned as an array. Its space is freed with the array.

    Raises:
        OSError, VolumeError: there is no room in the directory, or it cannot be written to.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._fd = open_nameless(directory)
        with closed_unless_made(self.close):
            reserve_space(self._fd, num_bytes, otherwise=lambda: os.ftruncate(self._fd, num_bytes))

    def write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Put bytes at an offset."""
        write_all(self._fd, data.data, offset)

    def array(self) -> npt.NDArray[np.uint8]:
        """Return all bytes as a 1-D array; writes stay in this process. Call it once, at the end."""
        array = _map(self._fd, self._num_bytes)
        self.close()  # the mapping keeps the nameless file
        return array

    def close(self) -> None:
        """Close the file; its space is freed unless an array maps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _map(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """All bytes of a file; the mapping keeps it."""
    address = map_memory(num_bytes, _PRIVATE, fd)
    return owned_array(address, num_bytes, unmap, address, num_bytes)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of an existing file as a 1-D array; writes stay in this process, and do not change the file.

    Raises:
        OSError: it cannot be opened or looked at.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if not num_bytes:  # mmap(2) refuses length 0
            return np.empty(0, dtype=np.uint8)
        return _map(file.fileno(), num_bytes)


@contextlib.contextmanager
def mapped_file(directories: Sequence[Path], num_bytes: int) -> Iterator[MappedFile | None]:
    """A new file in the first directory that has room for it, or None; closed when the ``with`` block ends."""
    found: MappedFile | None = None
    for directory in directories:
        # The next directory may have room; without any, the caller uses memory.
        with contextlib.suppress(OSError, VolumeError):
            found = MappedFile(directory, num_bytes)
            break
    with contextlib.closing(found) if found is not None else contextlib.nullcontext():
        yield found
