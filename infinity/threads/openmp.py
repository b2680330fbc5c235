"""The OpenMP worker threads behind torch's operators on the CPU.

[Note: one pool] GNU's OpenMP library (libgomp) keeps a pool of workers for every thread that has run a parallel
operator. If all pools together hold more threads than there are processors, its barriers stop spinning and sleep in the
kernel, in all pools. Idle pools count, too. Every operator ends with a barrier, and many take less time than such a
sleep. So our background threads give their workers back, or compute without any. Other OpenMP libraries do not count
threads, and are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

# omp_pause_soft of OpenMP 5.0: releases the workers, and keeps OpenMP's other state.
_SOFT_PAUSE = 1


def end_openmp_workers() -> None:
    """End the calling thread's workers. Its next parallel operator starts new ones."""
    for pause in _pauses():
        pause()


def use_threads(number: int) -> None:
    """Set how many threads the calling thread's operators use, itself included. Other threads keep their numbers."""
    # torch sets a thread's number at its first parallel operator or query, which would overwrite ours later.
    torch.get_num_threads()
    for library in _libraries():
        library.omp_set_num_threads(number)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operators of the calling thread run on it alone inside the ``with`` block: copies of a few MiB, between waits."""
    torch.get_num_threads()
    before = [library.omp_get_max_threads() for library in _libraries()]
    use_threads(1)
    try:
        yield
    finally:
        for library, number in zip(_libraries(), before, strict=True):
            library.omp_set_num_threads(number)


@functools.cache
def _pauses() -> tuple[Callable[[], int], ...]:
    found: list[Callable[[], int]] = []
    for library in _libraries():
        with contextlib.suppress(AttributeError):  # from OpenMP 5.0 on
            host = library.omp_get_initial_device()
            found.append(functools.partial(library.omp_pause_resource, _SOFT_PAUSE, host))
    return tuple(found)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """GNU's OpenMP libraries in this process: torch's, and perhaps one of another package."""
    if sys.platform != "linux":
        return ()
    try:
        # ctypes.CDLL by name could load a second copy, with pools of its own: only the files that are loaded count.
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    # address, permissions, offset, device, inode, path
    # torch's wheel brings a copy of its own, and another package may bring one more.
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    found: list[ctypes.CDLL] = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # deleted since, by an upgrade
            found.append(ctypes.CDLL(path))
    return tuple(found)
