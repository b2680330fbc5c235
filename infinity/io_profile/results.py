"""Everything that was measured, and what can be read off it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infinity.io_profile.fio import FioJob, FioSample
from infinity.io_profile.grid import WORKLOADS, Point, is_large, point_of
from infinity.io_profile.machine import CopySample
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample

REFERENCE_RATE = 2e9
"""Bytes per second at which the processor time of a backend is stated."""
REFERENCE_REQUEST_BYTES = 4 << 20

EQUAL = 0.05
"""Settings closer together than this are as good as each other: drives vary more from run to run."""


def median_rate(samples: Iterable[Sample | FioSample]) -> float:
    """Median bytes per second."""
    return statistics.median(sample.bytes_per_second for sample in samples)


@dataclass(frozen=True)
class Interval:
    """Where the median of what was sampled lies, with the given probability (`level`, 0 to 1)."""

    low: float
    high: float
    level: float


def median_interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """The shortest interval between two of the sorted values that holds the true median with at least `level`.

    It is the one of the sign test: each independent value is above the true median with probability 1/2, whatever the
    distribution. With fewer than six values even smallest to largest stays below 95 %; the level that is reached is said.
    """
    ordered = sorted(values)

    def coverage(cut: int) -> float:  # that it lies inside when so many values are left out at each end
        outside = sum(math.comb(len(ordered), below) for below in range(cut + 1)) / 2.0 ** len(ordered)
        return max(0.0, 1.0 - 2.0 * outside)

    cut = 0
    while coverage(cut + 1) >= level:
        cut += 1
    return Interval(ordered[cut], ordered[-1 - cut], coverage(cut))


@dataclass
class Comparison:
    """Our best setting against fio's best job for one workload: measured in turns, so that a drive's moods meet both."""

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

    request_sizes: Sequence[int]
    ours: dict[tuple[IOSetting, Workload], list[Sample]] = field(default_factory=dict)
    fio: dict[tuple[FioJob, Workload], list[FioSample]] = field(default_factory=dict)
    comparisons: dict[Workload, Comparison] = field(default_factory=dict)
    backends: dict[str, str | None] = field(default_factory=dict)
    """Each backend that was asked for; why it cannot be used, or None. The others were read back and found right."""
    engines: dict[str, str | None] = field(default_factory=dict)
    """Each of fio's engines, likewise."""
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
    def verified(self) -> list[str]:
        """Backends through which everything was read back and found right."""
        return [name for name, reason in self.backends.items() if reason is None]

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
        best = max(rates.values(), default=0.0)
        return max(
            rates,
            key=lambda each: (point_of(each) == near and rates[each] >= best * (1 - EQUAL), rates[each]),
            default=None,
        )

    def best_fio(self, workload: Workload, point: Point | None = None) -> FioJob | None:
        """fio's fastest job for a workload: at a point, or among the large requests."""
        rates = {
            job: median_rate(samples)
            for (job, of), samples in self.fio.items()
            if of is workload
            and (job.point == point if point is not None else is_large(job.request_bytes, self.request_sizes))
        }
        return max(rates, key=lambda job: rates[job], default=None)

    def share_of_fio(self, setting: IOSetting, workload: Workload) -> float | None:
        """A setting's median over that of fio at the same request size and depth."""
        rate, job = self.rate(setting, workload), self.best_fio(workload, point_of(setting))
        return None if rate is None or job is None else rate / median_rate(self.fio[job, workload])

    def cores_at_reference_rate(self, backend: str) -> dict[Workload, float]:
        """Cores that a backend keeps busy at 2 GB/s with requests of 4 MiB, scaled from the rate it was measured at."""
        found: dict[Workload, list[float]] = {}
        for (setting, workload), samples in self.ours.items():
            if setting.backend == backend and setting.request_bytes == REFERENCE_REQUEST_BYTES:
                found.setdefault(workload, []).extend(
                    each.cpu_seconds / (each.read_bytes + each.write_bytes) * REFERENCE_RATE for each in samples
                )
        return {workload: statistics.median(found[workload]) for workload in WORKLOADS if workload in found}

    def cores_per_gigabyte(self, setting: IOSetting) -> float:
        """Processor seconds that a setting takes for 10^9 bytes, over all workloads."""
        samples = [sample for workload in WORKLOADS for sample in self.ours.get((setting, workload), [])]
        moved = sum(sample.read_bytes + sample.write_bytes for sample in samples)
        return sum(sample.cpu_seconds for sample in samples) / moved * 1e9

    def final_rate(self, workload: Workload) -> float | None:
        """Our best rate as it was measured last: in the comparison, or else in the sweep."""
        comparison = self.comparisons.get(workload)
        if comparison is not None and comparison.pairs:
            return median_rate(ours for ours, _ in comparison.pairs)
        best = self.best(workload)
        return None if best is None else self.rate(best, workload)
