"""How much host memory is free, for budgets; and returning freed heap memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import resource
import sys
import weakref
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import psutil
import torch

from infinity.errors import format_bytes

logger = logging.getLogger(__name__)

# What an "auto" budget leaves free, see `find_free_memory`. A smaller reserve gives larger budgets, and a greater risk
# that the system ends the process.
_RESERVE = 0.10
_RESERVE_WITH_ACTIVATIONS = 0.25
_LEAST_RESERVE_BYTES = 2_000_000_000
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_CGROUP_V2 = Path("/sys/fs/cgroup")
# glibc only; musl, for one, has none.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_process = functools.cache(psutil.Process)  # making one takes longer than asking it


def process_bytes() -> tuple[int, int]:
    """Host memory of this process (resident set): now, and the most since it began."""
    now = _process(os.getpid()).memory_info().rss
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # ru_maxrss is in KiB


def free_bytes() -> int:
    """Host memory that is free: of the machine, or of this process's memory cgroup if that has less."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(limit.free_bytes for limit in memory_limits())])


@dataclass(frozen=True)
class FreeMemory:
    """The free host memory, and how much of it an "auto" budget takes."""

    free_bytes: int
    reserve_bytes: int
    """Not taken: for activations, autograd's temporaries, the data loader and other processes."""

    @property
    def budget_bytes(self) -> int:
        """The "auto" budget."""
        return self.free_bytes - self.reserve_bytes

    def warn_beyond(self, taken_bytes: int, released_bytes: int) -> None:
        """Warn if an engine will take more than is free.

        Args:
            taken_bytes: by the engine.
            released_bytes: the model's own tensors, which are freed first.
        """
        there = self.free_bytes + released_bytes
        if taken_bytes > there:
            logger.warning(
                "config key 'infinity.host_memory_budget': the engine takes %s, but only %s of host memory are free. The "
                'system may end the process. Set it to less, or to "auto"',
                format_bytes(taken_bytes),
                format_bytes(there),
            )

    def __str__(self) -> str:
        free, reserve = (f"{size / 1e6:,.0f} MB" for size in (self.free_bytes, self.reserve_bytes))
        return f"of {free} free, {reserve} stay in reserve"


def is_unified(torch_device: torch.device | None = None) -> bool:
    """Whether a GPU has no memory of its own and computes in the host's, as a GB10 does. None: the current one, if any."""
    if not torch.cuda.is_available() or (torch_device is not None and torch_device.type != "cuda"):
        return False
    return bool(getattr(torch.cuda.get_device_properties(torch_device), "is_integrated", 0))


def find_free_memory(
    *, holds_activations: bool, num_processes: int = 1, all_bytes: int | None = None, is_unified: bool = False
) -> FreeMemory:
    """What is free now, less a reserve: 10 % and at least 2 GB, but never more than half.

    Args:
        holds_activations: whether the model computes in this memory, too. Then 25 % stay in reserve: how much activations
            take is known only when the model has run.
        num_processes: processes on this machine that share the memory equally.
        all_bytes: free memory; None: measured now.
        is_unified: whether the GPU takes its memory from the same pool: then half of it is the GPU's.
    """
    # 40 GB free, one process: 10 % are 4 GB, so the budget is 36 GB. With activations, 25 % are 10 GB: 30 GB. 3 GB
    # free: 10 % are less than 2 GB, and 2 GB are more than half. So 1.5 GB stay in reserve.
    free = (free_bytes() if all_bytes is None else all_bytes) // num_processes // (2 if is_unified else 1)
    share = _RESERVE_WITH_ACTIVATIONS if holds_activations else _RESERVE
    return FreeMemory(free, min(max(int(share * free), _LEAST_RESERVE_BYTES), free // 2))


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory that a control group sets."""

    folder: Path
    limit_bytes: int
    free_bytes: int
    """The limit minus usage, page cache not counted."""


def memory_limits() -> list[MemoryLimit]:
    """Limits of this process's control group and of its parents; empty without any."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[MemoryLimit] = []
    for line in lines:
        # Lines are "number:controllers:path". Version 1: "9:memory:/docker/abc". Version 2: "0::/user.slice/job.scope".
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = _CGROUP_V1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            root, names = _CGROUP_V2, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Each group up to the root may have a limit, and the tightest one counts.
        groups = [group for group in (folder, *folder.parents) if group.is_relative_to(root)]
        found += [limit for group in groups if (limit := _limit(group, *names)) is not None]
    return found


def _limit(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> MemoryLimit | None:
    try:
        # In a container, the path in /proc/self/cgroup may be the host's: then the files are missing here, and the
        # group is skipped.
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        limit_bytes, usage = int(limit), int((folder / usage_name).read_text())
        statistics = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    # The page cache counts as usage, but the kernel drops it before it enforces the limit.
    cache = int(statistics[statistics.index(cache_key) + 1]) if cache_key in statistics else 0
    return MemoryLimit(folder, limit_bytes, max(limit_bytes - usage + cache, 0))


def trim_heap() -> None:
    """Make the C library return freed heap memory to the system (glibc only).

    After a large model's tensors have been freed one by one, the heap keeps much of their memory in gaps.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


class HeapTrimmer:
    """Returns freed heap memory to the system between units, when the process has grown by so many bytes.

    On the CPU, each layer's temporaries leave gaps around the few tensors that stay for backward, and the heap grows with
    every layer though hardly anything in it is used. Threads make it worse: each has a heap of its own.
    """

    def __init__(self, growth_bytes: int = 32 << 20) -> None:
        """``growth_bytes``: since the last trim; in a step, filling 32 MiB takes longer than the trim."""
        self._growth_bytes = growth_bytes
        self._least_bytes: int | None = None
        self._statm: FileIO | None = None
        with contextlib.suppress(OSError):  # no Linux
            self._statm = FileIO("/proc/self/statm")  # stays open: it is read for each layer
            weakref.finalize(self, self._statm.close)

    def trim(self) -> None:
        """Trim, if the process has grown enough. Called between two units."""
        if self._statm is None:
            return
        # Compared with the least seen since the last trim. Least 500 MB, now 540 MB: trim. If 505 MB are left, those
        # are in use, and the next trim comes at 537 MB.
        now = self._anonymous_bytes(self._statm)
        least = now if self._least_bytes is None else min(now, self._least_bytes)
        if now - least >= self._growth_bytes:
            trim_heap()
            least = self._anonymous_bytes(self._statm)
        self._least_bytes = least

    @staticmethod
    def _anonymous_bytes(statm: FileIO) -> int:
        """Anonymous memory of this process, as the kernel counts it."""
        statm.seek(0)
        # In pages: size, resident, shared, ... Here `shared` means pages of files and of shared memory.
        fields = statm.read(256).split()
        return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
