"""``mmap(2)`` through ctypes, for mappings that Python's ``mmap`` cannot make.

Those are mappings at a given address, without reserved memory, or of a file whose descriptor is closed afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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


class _OwnedArray:
    # np.asarray() below keeps this object as the array's base, and so do all views: it dies with the last of them.
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def owned_array(address: int, num_bytes: int, release: Callable[..., object], *args: object) -> npt.NDArray[np.uint8]:
    """Return memory as a 1-D writable uint8 array; call ``release(*args)`` when its last view is gone.

    The call also comes in a forked child, and not at the end of the process.
    """
    owned = _OwnedArray(address, num_bytes)
    weakref.finalize(owned, release, *args).atexit = False  # at exit, other threads may still use the memory
    return np.asarray(owned)
