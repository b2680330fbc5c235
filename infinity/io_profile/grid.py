"""What is measured: at which settings, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapper.config import BackendName
from swapper.measure.io_setting import STEP_READ_SHARE, IOSetting, Workload

MIB = 1 << 20
GIB = 1 << 30
WORKLOADS = (Workload.READ, Workload.WRITE, Workload.MIXED)
READ_SHARE = round(STEP_READ_SHARE, 2)
"""Of the mixed workload; fio takes whole percents only."""
BACKENDS: tuple[BackendName, ...] = ("threads", "uring", "aiofiles")
"""Swept unless `--backends` says otherwise."""
LEAST_PAIRS = 7
"""Fewer give an interval below 95 %."""
LEAST_THREADS = 4
"""The engine never uses fewer, so a setting with fewer could not be put into a config."""
_BASE_DEPTH = 8


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
    if IOSetting(backend, point.request_bytes, 1, 1).has_threads:
        num_threads = max(LEAST_THREADS, point.depth)
        return IOSetting(backend, point.request_bytes, num_threads, num_threads * max(2, 32 // num_threads))
    return IOSetting(backend, point.request_bytes, LEAST_THREADS, point.depth)


@dataclass(frozen=True)
class Effort:
    """Which settings are measured, one line over the request size and one over the requests in flight, and how much.

    Attributes:
        file_bytes: size of the test file in each directory.
        sample_seconds: length of one measurement of the sweep.
        pair_seconds: length of each half of a pair of the final comparison.
        num_repetitions: rounds of the sweep.
        num_pairs: pairs of the final comparison.
        num_engine_trials: how often each engine of fio is tried before the best one goes on.
        rechecks_engines: whether the engines are tried once more at fio's best setting.
        request_sizes: bytes of one request.
        depths: requests in flight.
        longest_fill_seconds: the test files are cut short where writing them takes longer.
        limit_seconds: rounds of the sweep are left out where all would take longer than this; None for no limit.
    """

    file_bytes: int = GIB
    sample_seconds: float = 0.15
    pair_seconds: float = 0.5
    num_repetitions: int = 3
    num_pairs: int = LEAST_PAIRS
    num_engine_trials: int = 2
    rechecks_engines: bool = True
    request_sizes: tuple[int, ...] = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (4, 8, 16, 32)
    longest_fill_seconds: float = 60.0
    limit_seconds: float | None = None

    @property
    def over_sizes(self) -> list[Point]:
        """Every request size at one depth."""
        depth = min(self.depths, key=lambda each: abs(each - _BASE_DEPTH))
        return [Point(size, depth) for size in sorted(self.request_sizes)]

    @property
    def over_depths(self) -> list[Point]:
        """Every depth at one request size."""
        size = min(self.request_sizes, key=lambda each: abs(each - MIB))
        return [Point(size, depth) for depth in sorted(self.depths)]

    @property
    def points(self) -> list[Point]:
        """Each point once."""
        return sorted({*self.over_sizes, *self.over_depths})

    def points_for(self, backend: str, backends: Sequence[str]) -> list[Point]:
        """The portable backend gets a few points where a faster one is measured too: it is there for completeness."""
        if backend != "aiofiles" or len(backends) == 1:
            return self.points
        return [point for point in self.over_sizes if point.request_bytes >= MIB][:2] or self.over_sizes[-1:]

    def settings(self, backends: Sequence[BackendName]) -> list[IOSetting]:
        """Every setting of ours; those that differ in no way that matters are there once."""
        found = [setting_at(backend, point) for backend in backends for point in self.points_for(backend, backends)]
        return list(dict.fromkeys(found))

    @property
    def least_file_bytes(self) -> int:
        """Smallest test file in which all of them can be measured: reads and writes get a half each."""
        windows = [each.window for each in self.settings(BACKENDS)]
        return 2 * max(each.operation_bytes * (each.num_operations + 1) for each in windows)


FULL = Effort()
"""About two minutes with fio."""
QUICK = Effort(
    file_bytes=GIB // 2,
    sample_seconds=0.08,
    pair_seconds=0.25,
    num_repetitions=2,
    num_engine_trials=1,
    rechecks_engines=False,
    request_sizes=(MIB // 4, MIB, 4 * MIB),
    depths=(4, 8, 32),
    longest_fill_seconds=20.0,
    limit_seconds=50.0,
)
"""Under a minute with fio."""


def is_large(request_bytes: int, request_sizes: Sequence[int]) -> bool:
    """Whether a size takes part in the comparison of the best: 1 MiB and more, or the largest one if all are below."""
    return request_bytes >= min(MIB, max(request_sizes))


def size_words(num_bytes: int) -> str:
    """`256 KiB`, `1 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
