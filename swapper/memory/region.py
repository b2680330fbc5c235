"""Page-aligned memory that direct I/O and the device driver both accept; and ``mmap(2)`` through ctypes.

The latter is for mappings that Python's ``mmap`` cannot make: at a given address, without reserved memory, or of a file
whose descriptor is closed afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from swapper.config import round_up
from swapper.errors import ArgumentError
from swapper.memory.held import is_held
from swapper.sync.limits import limits_in_words
from swapper.uncopyable import Uncopyable

_HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value  # (void *) -1

unmap = _libc.munmap
"""``unmap(address, num_bytes)``"""
advise = _libc.madvise
"""``advise(address, num_bytes, advice)``; returns 0 if the kernel takes it."""


def map_memory(num_bytes: int, flags: int, fd: int = -1, address: int | None = None) -> int:
    """Return the address of a readable and writable mapping: of a file from its beginning, or anonymous.

    Raises:
        OSError: The kernel does not make it.
    """
    found = _libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {num_bytes} bytes of memory: {os.strerror(code)}")
    return int(found)


_mapped: dict[int, int] = {}  # bytes of each mapping that are not discarded, by its address
_most_bytes = 0  # the peak since pop_peak_bytes()
_counting = threading.RLock()  # guards _most_bytes; re-entrant, since a finalizer may make a region meanwhile


def _count(address: int, num_bytes: int) -> None:
    global _most_bytes
    with _counting:
        _mapped[address] = num_bytes
        _most_bytes = max(_most_bytes, sum(list(_mapped.values())))  # a list: a mapping may end meanwhile


class _Mapping:
    """One anonymous mapping, unmapped when the last reference to it is gone."""

    def __init__(self, num_bytes: int) -> None:
        # A start on a huge page boundary lets the kernel back all of it with huge pages: a direct transfer then
        # consists of few large pieces instead of hundreds of small ones (measured, 1 MiB reads of a virtio drive: 2.6
        # instead of 1.4 GB/s, and half the CPU time). The slack around is given back. Example: 4 MiB are mapped as 6
        # MiB, at base = 0x7f0000100000. Then address = 0x7f0000200000, and 1 MiB in front of it and 1 MiB behind its 4
        # MiB are unmapped.
        slack = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else 0
        with limits_in_words():
            base = map_memory(num_bytes + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = round_up(base, _HUGE_PAGE_BYTES) if slack else base
        self.num_bytes = num_bytes
        if slack:
            head = self.address - base
            unmap(base, head)  # of 0 bytes, it does nothing
            unmap(self.address + num_bytes, slack - head)
            advise(self.address, num_bytes, mmap.MADV_HUGEPAGE)
        # After a fork, the parent's next write to a shared page would give it a copy, while direct I/O goes on with the
        # old page: see O_DIRECT in open(2).
        advise(self.address, num_bytes, mmap.MADV_DONTFORK)
        _count(self.address, num_bytes)
        self._pid = os.getpid()

    # No `weakref.finalize`: Python walks its registry when the process ends, while workers may still drop regions.
    # Defaults, because the module's names may be gone when the last region is dropped at exit.
    def __del__(self, munmap: Any = unmap, getpid: Any = os.getpid, forget: Any = _mapped.pop) -> None:
        # A forked child never had this mapping (MADV_DONTFORK): by now the address may belong to something else there.
        # Without _pid, the constructor failed before the mapping was whole.
        if getattr(self, "_pid", None) == getpid():
            forget(self.address, None)  # first: the next mapping may get this address
            munmap(self.address, self.num_bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Tell numpy where the bytes are; an array made from it keeps this object, hence the mapping, alive."""
        return {"version": 3, "data": (self.address, False), "shape": (self.num_bytes,), "typestr": "|u1"}


class AlignedRegion(Uncopyable):
    """A page-aligned anonymous private mapping of ``num_bytes``, rounded up to 4096. Forked children do not have it.

    Args:
        num_bytes: Size wanted, at least 1.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ArgumentError(f"a region needs at least one byte, got {num_bytes}")
        self.num_bytes = num_bytes
        mapping = _Mapping(round_up(num_bytes))
        self._address = mapping.address
        # Keeps the mapping. Arrays that are given out are views of it, so they keep the mapping after release().
        self._bytes: npt.NDArray[np.uint8] | None = np.asarray(mapping)
        # Tokens of io_uring rings and device drivers that have pinned its pages: they would go on to use the old pages
        # after a discard().
        self.registrations: set[object] = set()

    @staticmethod
    def pop_peak_bytes() -> int:
        """Return the peak of bytes in all regions of this process since the last call."""
        global _most_bytes
        with _counting:
            peak, _most_bytes = _most_bytes, sum(list(_mapped.values()))
        return peak

    @staticmethod
    def mapped_bytes() -> int:
        """Return the memory that all regions of this process have now."""
        with _counting:
            return sum(list(_mapped.values()))

    def _live(self) -> npt.NDArray[np.uint8]:
        if (found := self._bytes) is None:
            raise ArgumentError("this memory region has been released; make a new one")
        return found

    @property
    def address(self) -> int:
        """Address of the first byte."""
        self._live()
        return self._address

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` has been called."""
        return self._bytes is None

    def array(self) -> npt.NDArray[np.uint8]:
        """Return a fresh writable uint8 array over all bytes; it keeps the memory mapped while it lives."""
        return self._live()[: self.num_bytes]

    def discard(self, num_bytes: int) -> int:
        """Give the memory of the first ``num_bytes`` back to the system, in whole huge pages.

        They stay mapped. Their contents are undefined, and writing to them takes memory again. Nothing is given back
        while the region is registered, or while a request uses some of these bytes.

        Returns:
            How many bytes were given back, from the first on.
        """
        if not 0 <= num_bytes <= self.num_bytes:
            raise ArgumentError(f"a region of {self.num_bytes} bytes has no first {num_bytes}")
        memory = self._live()  # until the end: a release in between must not unmap it
        whole = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES  # less would split a huge page into small ones
        if not whole or self.registrations or is_held(self._address, num_bytes):
            return 0
        if advise(self._address, whole, mmap.MADV_DONTNEED):
            return 0
        _count(self._address, memory.size - whole)
        return whole

    def release(self) -> None:
        """Release the memory now, or as soon as the last array over it is garbage-collected. Calling it again does nothing."""
        self._bytes = None
