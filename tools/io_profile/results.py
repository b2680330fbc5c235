"""Everything that was measured, and what can be read off it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample

from .copies import CopySample
from .fio import FioJob, FioSample
from .grid import WORKLOADS, Point, is_large, point_of
from .spread import Interval, median_interval

REFERENCE_RATE = 2e9
"""Bytes per second at which the processor time of a backend is stated."""
REFERENCE_REQUEST_BYTES = 4 << 20

EQUAL = 0.05
"""Settings closer together than this are as good as each other: drives vary more from run to run."""


def median_rate(samples: Iterable[Sample | FioSample]) -> float:
    """Median bytes per second."""
    return statistics.median(sample.bytes_per_second for sample in samples)


@dataclass
class Comparison:
    """Our best setting against fio's best job for one workload: measured in turns, so that a drive's moods meet both."""

    workload: Workload
    setting: IOSetting
    job: FioJob
    pairs: list[tuple[Sample, FioSample]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours over fio's, pair by pair."""
        return [ours.bytes_per_second / theirs.bytes_per_second for ours, theirs in self.pairs]

    @property
    def share(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Interval:
        """Where the true median of the ratios lies."""
        return median_interval(self.ratios)


@dataclass(frozen=True)
class AloneRate:
    """What one of several drives does by itself, bytes per second."""

    directory: str
    read: float
    write: float


@dataclass
class Results:
    """Knows samples and their medians; must not know how they were made or what they are good for."""

    request_sizes: Sequence[int] = ()
    ours: dict[tuple[IOSetting, Workload], list[Sample]] = field(default_factory=dict)
    fio: dict[tuple[FioJob, Workload], list[FioSample]] = field(default_factory=dict)
    comparisons: dict[Workload, Comparison] = field(default_factory=dict)
    backends: dict[str, str | None] = field(default_factory=dict)
    """Each backend that was asked for; why it cannot be used, or None."""
    engines: dict[str, str | None] = field(default_factory=dict)
    """Each of fio's engines, likewise."""
    verified: list[str] = field(default_factory=list)
    """Backends through which everything was read back and found right."""
    alone: list[AloneRate] = field(default_factory=list)
    copies: list[CopySample] = field(default_factory=list)
    written_bytes: int = 0
    """Put onto the drives by all of this, fio included."""
    notes: list[str] = field(default_factory=list)
    """What came up on the way, in sentences."""
    stopped_by: str | None = None
    """Why it is not complete, in words."""

    def add(self, sample: Sample) -> None:
        """A sample of ours of the sweep."""
        self.ours.setdefault((sample.setting, sample.workload), []).append(sample)
        self.written_bytes += sample.write_bytes

    def add_fio(self, sample: FioSample) -> None:
        """A sample of fio's of the sweep."""
        self.fio.setdefault((sample.job, sample.workload), []).append(sample)
        self.written_bytes += sample.written_bytes

    @property
    def settings(self) -> list[IOSetting]:
        """Every setting that was measured for at least one workload, in the order of measuring."""
        return list(dict.fromkeys(setting for setting, _ in self.ours))

    def rate(self, setting: IOSetting, workload: Workload) -> float | None:
        """Median bytes per second of a setting; None if it was not measured."""
        samples = self.ours.get((setting, workload))
        return median_rate(samples) if samples else None

    def best(self, workload: Workload, near: Point | None = None) -> IOSetting | None:
        """Our fastest setting for a workload among the large requests; one at the point `near`, if it is as good."""
        rates = {
            setting: median_rate(samples)
            for (setting, of), samples in self.ours.items()
            if of is workload and is_large(setting.request_bytes, self.request_sizes)
        }
        if not rates:
            return None
        best = max(rates.values())
        return max(rates, key=lambda each: (point_of(each) == near and rates[each] >= best * (1 - EQUAL), rates[each]))

    def best_fio(self, workload: Workload) -> FioJob | None:
        """fio's fastest job for a workload among the large requests."""
        rates = {
            job: median_rate(samples)
            for (job, of), samples in self.fio.items()
            if of is workload and is_large(job.request_bytes, self.request_sizes)
        }
        return max(rates, key=lambda job: rates[job], default=None)

    def fio_at(self, point: Point, workload: Workload) -> tuple[FioJob, list[FioSample]] | None:
        """fio's fastest job with the same request size and depth."""
        found = [(job, s) for (job, of), s in self.fio.items() if of is workload and job.point == point]
        return max(found, key=lambda each: median_rate(each[1]), default=None)

    def share_of_fio(self, setting: IOSetting, workload: Workload) -> float | None:
        """A setting's median over that of fio at the same request size and depth."""
        rate, theirs = self.rate(setting, workload), self.fio_at(point_of(setting), workload)
        return None if rate is None or theirs is None else rate / median_rate(theirs[1])

    def cores_at_reference_rate(self, backend: str, workload: Workload) -> float | None:
        """Cores that a backend keeps busy at 2 GB/s with requests of 4 MiB, scaled from the rate it was measured at."""
        found = [
            sample.cpu_seconds / (sample.read_bytes + sample.write_bytes) * REFERENCE_RATE
            for (setting, of), samples in self.ours.items()
            for sample in samples
            if setting.backend == backend and of is workload and setting.request_bytes == REFERENCE_REQUEST_BYTES
        ]
        return statistics.median(found) if found else None

    def cores_per_gigabyte(self, setting: IOSetting) -> float | None:
        """Processor seconds that a setting takes for 10^9 bytes, over all workloads."""
        samples = [sample for workload in WORKLOADS for sample in self.ours.get((setting, workload), [])]
        moved = sum(sample.read_bytes + sample.write_bytes for sample in samples)
        return sum(sample.cpu_seconds for sample in samples) / moved * 1e9 if moved else None

    def final_rate(self, workload: Workload) -> float | None:
        """Our best rate as it was measured last: in the comparison, or else in the sweep."""
        comparison = self.comparisons.get(workload)
        if comparison is not None and comparison.pairs:
            return median_rate(ours for ours, _ in comparison.pairs)
        best = self.best(workload)
        return None if best is None else self.rate(best, workload)
