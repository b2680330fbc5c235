"""Arrays on drives: shared mappings of nameless files, which are written out and dropped while they are filled.

Such an array works like any other, and needs hardly any memory. One thread per process watches how many bytes of all
these arrays are in memory. Above `WINDOW_BYTES` it writes them out and drops their pages. The kernel reads a dropped
page again when it is used.

[Note: who waits] A program can fill pages faster than a drive writes them. If it is far ahead, the thread keeps the
interpreter's lock while it writes, so that no Python thread begins another operation.

[Note: nothing is lost] A mapping and the page cache are the same memory, and only pages that have reached the file are
dropped. So pages may be dropped at any moment, also while other threads write to them.

A `MappedFile` is written once. Writes to its array stay in this process, as do those to an existing file's (`map_file`).
The kernel can drop unchanged pages of both, and read them again, like those of a program's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swapper.errors import VolumeError, as_volume_error, error_words
from swapper.memory.region import map_memory, unmap
from swapper.sync.limits import start_threads
from swapper.uncopyable import closed_unless_made
from swapper.volumes.own_files import opened
from swapper.volumes.scratch_file import (
    fallocate,
    open_nameless,
    reserve_space,
    taking_space,
    write_all,
    write_in_place,
)

WINDOW_BYTES = 64 << 20
"""Bytes of all arrays together that may be in memory before they are written out."""
_AHEAD_BYTES = 2 * WINDOW_BYTES  # from here on, writing out keeps the interpreter's lock: see [Note: who waits]
_SEGMENT_BYTES = 16 << 30  # of addresses; space on the drive is reserved for each array
_SECONDS_BETWEEN_LOOKS = 0.01  # a program that fills 6.7 GB/s fills one window between two looks
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_*: wait for writes that are running, write, and wait again

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)  # the same functions, called with the interpreter's lock
for _library in (_libc, _libc_with_lock):
    _library.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_MAP_FIXED = 0x10
# 0x4000 is MAP_NORESERVE, on all of Linux but Alpha, MIPS and PA-RISC. Without it, the kernel reserves memory for a
# copy of each page, and refuses a file that is larger than all memory.
_PRIVATE = mmap.MAP_PRIVATE | 0x4000
_PAGEMAP = Path("/proc/self/pagemap")


class MappedMemory:
    """Allocates arrays in nameless files, in one directory after the other that has room.

    The space of an array is freed when its last view is gone.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = list(directories)
        # By directory, the segment with space left. Weak: a segment is closed when its last array is gone.
        self._open: weakref.WeakValueDictionary[Path, _Segment] = weakref.WeakValueDictionary()
        self._num_given = 0  # arrays: the next one begins with the next directory
        self._lock = threading.RLock()  # guards all above, and the segments' allocate()

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """An array of zeros, 1-D, at the beginning of a page.

        Raises:
            VolumeTooSmallError: no directory has so much room; the message names one, and the bytes.
            VolumeError: none can be written to, or an earlier array could not be written out.
        """
        _writer.check()
        with self._lock:
            first = self._num_given
            self._num_given += 1
            failure: VolumeError | None = None
            for turn in range(len(self._directories)):
                directory = self._directories[(first + turn) % len(self._directories)]
                try:
                    segment = self._open.get(directory)
                    if segment is None or segment.left_bytes < num_bytes:
                        segment = self._open[directory] = _Segment(self, directory, max(_SEGMENT_BYTES, num_bytes))
                        _writer.add(segment)
                    offset = segment.allocate(num_bytes)
                    # The array's finalizer holds the bound method, and so the segment with its mapping.
                    return _owned_array(segment.address + offset, num_bytes, segment.free, offset, num_bytes)
                except VolumeError as error:
                    failure = failure or error
            raise failure or ValueError("no directory is given")


class _Segment:
    """One file and its mapping, allocated from the beginning to the end. It is closed when its last array is gone."""

    def __init__(self, owner: MappedMemory, directory: Path, num_bytes: int) -> None:
        self.owner = owner
        self._directory = directory
        self.num_bytes = self.left_bytes = num_bytes  # left: at its end
        self._process = os.getpid()
        self.address, self._fd = 0, -1  # for __del__, if the constructor fails
        self._fd = open_nameless(directory)
        with as_volume_error(directory, f"no file can be mapped in {str(directory)!r}"):
            write_in_place(self._fd)
            os.ftruncate(self._fd, num_bytes)  # a sparse file: allocate() reserves space
            self.address = map_memory(num_bytes, mmap.MAP_SHARED, self._fd)

    def __del__(self) -> None:
        if self.address:
            unmap(self.address, self.num_bytes)
        if self._fd >= 0:
            os.close(self._fd)

    def allocate(self, num_bytes: int) -> int:
        """Reserve space for a new part, and return its offset."""
        # A write to a mapped page without space on the drive would end the process with SIGBUS.
        offset = self.num_bytes - self.left_bytes
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        problem = f"cannot reserve {length} bytes in {str(self._directory)!r}"
        with (
            as_volume_error(self._directory, problem),
            taking_space(self._fd, self._directory, length),
            closed_unless_made(self.free, offset, num_bytes),  # what it got before it failed
        ):
            reserve_space(self._fd, length, offset, _KEEP_SIZE)
        self.left_bytes -= length
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Free the space of a part. Takes no lock: finalizers call this."""
        if os.getpid() == self._process:  # a forked child has only released its own view
            length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # without holes, the space is freed together with the file
                fallocate(self._fd, length, offset, _PUNCH_HOLE | _KEEP_SIZE)

    def write_out(self, *, keeps_lock: bool) -> None:
        """Write changed pages to the drive, and drop all pages: see [Note: nothing is lost].

        Raises:
            VolumeError: the drive fails.
        """
        library = _libc_with_lock if keeps_lock else _libc
        try:
            if library.sync_file_range(self._fd, 0, 0, _WRITE_AND_WAIT):  # 0, 0: the whole file
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            # Mapped again at the same address. fadvise drops only pages that are not mapped; and the page tables, 2 MB
            # per GB, are freed as well.
            map_memory(self.num_bytes, mmap.MAP_SHARED | _MAP_FIXED, self._fd, self.address)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise VolumeError(
                self._directory,
                f"tensors in directory {str(self._directory)!r} cannot be written: {error_words(error)}",
            ) from error


class _Writer:
    """Writes all segments out whenever much of them is in memory. Its thread runs as long as there are segments."""

    def __init__(self) -> None:
        self._segments: weakref.WeakSet[_Segment] = weakref.WeakSet()
        self._lock = threading.RLock()  # guards _segments and _thread
        self._thread: threading.Thread | None = None
        # Mapped bytes just after the last writing out: code of libraries, above all. What exceeds them is counted as
        # ours.
        self._floor_bytes = 0
        self._failure: VolumeError | None = None  # the first one; allocate() raises it from then on

    def add(self, segment: _Segment) -> None:
        """Watch a new segment."""
        with self._lock:
            self._segments.add(segment)
            if self._thread is None or not self._thread.is_alive():  # not after a fork
                self._floor_bytes = _mapped_bytes()
                self._thread = threading.Thread(target=self._run, name="infinity-mapped-memory", daemon=True)
                start_threads(self._thread)

    def segments(self) -> list[_Segment]:
        """Return the segments that are still in use."""
        with self._lock:
            return list(self._segments)

    def check(self) -> None:
        """Raise the first error of writing out."""
        if self._failure is not None:
            raise self._failure

    def write_out(self, *, keeps_lock: bool = False) -> None:
        """Write all segments out, and drop their pages. `check` raises a failure."""
        for segment in self.segments():
            try:
                segment.write_out(keeps_lock=keeps_lock)
            except VolumeError as error:
                self._failure = self._failure or error
        self._floor_bytes = _mapped_bytes()

    def _run(self) -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            mapped_bytes = _mapped_bytes()
            if mapped_bytes - self._floor_bytes >= WINDOW_BYTES:
                self.write_out(keeps_lock=mapped_bytes - self._floor_bytes >= _AHEAD_BYTES)
            self._floor_bytes = min(self._floor_bytes, mapped_bytes)  # the kernel may have dropped pages by itself
            with self._lock:  # add() must see either a running thread or None
                if not self._segments:
                    self._thread = None
                    return


_writer = _Writer()


def write_out() -> None:
    """Write all mapped memory of this process out, and drop its pages.

    Raises:
        VolumeError: a drive fails, now or since the beginning.
    """
    _writer.write_out()
    _writer.check()


def owner_of(address: int) -> MappedMemory | None:
    """The `MappedMemory` that an address belongs to."""
    for segment in _writer.segments():
        if segment.address <= address < segment.address + segment.num_bytes:
            return segment.owner
    return None


def is_in_use() -> bool:
    """Whether any array of mapped memory is in use."""
    return bool(_writer.segments())


def touched(address: int, num_bytes: int, piece_bytes: int = 1 << 20) -> Iterator[tuple[int, int]]:
    """Yield the parts of ordinary memory that were ever touched, as offsets; all if the kernel does not say."""
    for start in range(0, num_bytes, piece_bytes):
        stop = min(start + piece_bytes, num_bytes)
        if _is_touched(address + start, address + stop):
            yield start, stop


def _is_touched(start: int, stop: int) -> bool:
    # pagemap has 8 bytes for each page of the address space. Bit 63: in memory; bit 62: swapped out.
    first, last = start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE)
    try:
        with opened(_PAGEMAP) as pagemap:
            entries = np.frombuffer(os.pread(pagemap, (last - first) * 8, first * 8), dtype=np.uint64)
    except OSError:
        return True
    return len(entries) < last - first or bool((entries >> np.uint64(62)).any())


class _OwnedArray:
    # np.asarray() below keeps this object as the array's base, and so do all views: it dies with the last of them.
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _owned_array(address: int, num_bytes: int, release: Callable[..., object], *args: object) -> npt.NDArray[np.uint8]:
    """Return memory as a 1-D writable uint8 array; call ``release(*args)`` when its last view is gone.

    The call also comes in a forked child, and not at the end of the process.
    """
    owned = _OwnedArray(address, num_bytes)
    weakref.finalize(owned, release, *args).atexit = False  # at exit, other threads may still use the memory
    return np.asarray(owned)


def _mapped_bytes() -> int:
    """Bytes of mapped files and shared memory in this process's memory."""
    with open("/proc/self/statm", "rb") as file:  # the third number, in pages
        return int(file.read().split()[2]) * mmap.PAGESIZE


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
    return _owned_array(address, num_bytes, unmap, address, num_bytes)


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
