"""The worker threads behind torch's operators on the CPU.

Knows the OpenMP library that torch has loaded; must not know models or engines.

[Note: one pool] GNU's OpenMP library keeps workers for every thread that has computed with more than one of them. When all
pools together hold more threads than there are processors, a barrier no longer waits a moment for the others but sleeps
in the kernel, in all pools, and one that rests counts like one that works. An operator ends with a barrier, and many take
less time than such a sleep. So threads of ours that compute in between give their workers back, or do with none.
Other OpenMP libraries do not count threads, and are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_SOFT_PAUSE = 1


def release_workers() -> None:
    """End the calling thread's workers. It gets new ones with its next operator that wants some.

    Costs nothing where there are none, and else about as much as starting them.
    """
    for pause in _pauses():
        pause()


def use_threads(number: int) -> None:
    """Operators of the calling thread run on so many from now on, itself included; other threads keep their numbers."""
    torch.get_num_threads()  # torch sets a thread's number when it is first asked for it
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
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    # address, permissions, offset, device, inode, path
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    found: list[ctypes.CDLL] = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # deleted since, by an upgrade
            found.append(ctypes.CDLL(path))
    return tuple(found)
