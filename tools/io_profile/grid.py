"""Which settings are measured: one line over the request size, one over the requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapper.config import BackendName
from swapper.measure.io_setting import IOSetting, Workload

from .effort import MIB

WORKLOADS = (Workload.READ, Workload.WRITE, Workload.MIXED)
LEAST_THREADS = 4
"""The engine never uses fewer, so a setting with fewer could not be put into a config."""
_BASE_DEPTH = 8
_WAITS_IN_THREADS = ("threads", "aiofiles")
_SMALLEST_COMPARED = MIB


@dataclass(frozen=True, order=True)
class Point:
    """What our settings and fio's jobs are compared at: bytes of one request, and requests under way at once."""

    request_bytes: int
    depth: int


def point_of(setting: IOSetting) -> Point:
    """Where a setting of ours is compared with fio."""
    return Point(setting.request_bytes, setting.num_inflight)


def setting_at(backend: BackendName, point: Point) -> IOSetting:
    """The setting that has `point.depth` requests of a backend under way, in values that a config can express.

    Where each request waits in a thread there are as many threads, and a few requests more are handed out so that no
    thread waits for its next one. io_uring has no such threads: their number only stands in the config.
    """
    if backend in _WAITS_IN_THREADS:
        num_threads = max(LEAST_THREADS, point.depth)
        return IOSetting(backend, point.request_bytes, num_threads, num_threads * max(2, 32 // num_threads))
    return IOSetting(backend, point.request_bytes, LEAST_THREADS, point.depth)


def line_over_sizes(request_sizes: Sequence[int], depths: Sequence[int]) -> list[Point]:
    """Every request size at one depth."""
    depth = min(depths, key=lambda each: abs(each - _BASE_DEPTH))
    return [Point(size, depth) for size in sorted(request_sizes)]


def line_over_depths(request_sizes: Sequence[int], depths: Sequence[int]) -> list[Point]:
    """Every depth at one request size."""
    size = min(request_sizes, key=lambda each: abs(each - MIB))
    return [Point(size, depth) for depth in sorted(depths)]


@dataclass(frozen=True)
class Grid:
    """All points, and which of them each backend is measured at."""

    over_sizes: tuple[Point, ...]
    over_depths: tuple[Point, ...]

    @classmethod
    def of(cls, request_sizes: Sequence[int], depths: Sequence[int]) -> Grid:
        """The grid over these sizes and depths."""
        return cls(tuple(line_over_sizes(request_sizes, depths)), tuple(line_over_depths(request_sizes, depths)))

    @property
    def points(self) -> list[Point]:
        """Each point once."""
        return sorted({*self.over_sizes, *self.over_depths})

    def points_for(self, backend: str, backends: Sequence[str]) -> list[Point]:
        """The portable backend gets a few points where a faster one is measured too: it is there for completeness."""
        if backend != "aiofiles" or len(backends) == 1:
            return self.points
        base = self.over_sizes[0].depth
        sizes = [point for point in self.over_sizes if point.depth == base and point.request_bytes >= MIB]
        return sizes[:2] or list(self.over_sizes[-1:])

    def settings(self, backends: Sequence[BackendName]) -> list[IOSetting]:
        """Every setting of ours; those that differ in no way that matters are there once."""
        found = [setting_at(backend, point) for backend in backends for point in self.points_for(backend, backends)]
        return list(dict.fromkeys(found))

    @property
    def least_file_bytes(self) -> int:
        """Smallest test file in which all of them can be measured: reads and writes get a half each."""
        windows = [
            setting.operation_bytes * (setting.num_operations + 1)
            for setting in self.settings(("threads", "uring", "aiofiles"))
        ]
        return 2 * max(windows)


def is_large(request_bytes: int, request_sizes: Sequence[int]) -> bool:
    """Whether a size takes part in the comparison of the best: 1 MiB and more, or the largest one if all are below."""
    return request_bytes >= min(_SMALLEST_COMPARED, max(request_sizes))


def size_words(num_bytes: int) -> str:
    """`256 KiB`, `1 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
