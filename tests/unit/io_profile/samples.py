"""Samples as drives and fio might give them."""

from __future__ import annotations

from infinity.io_profile.fio import FioJob, FioSample
from infinity.io_profile.grid import WORKLOADS
from infinity.io_profile.results import Results
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample

_MIB = 1 << 20


def sample(setting: IOSetting, workload: Workload, rate: float, cpu_seconds: float = 0.1) -> Sample:
    """One second at `rate` bytes per second."""
    return Sample(setting, workload, int(rate), 0, 1.0, cpu_seconds)


def fio_sample(job: FioJob, workload: Workload, rate: float) -> FioSample:
    """fio at `rate`."""
    return FioSample(job, workload, rate, 0.0, 0, 0.1)


def results_of(rates: dict[IOSetting, float]) -> Results:
    """A sweep in which every setting does everything at the same rate."""
    results = Results(request_sizes=(_MIB, 4 * _MIB, 16 * _MIB))
    for setting, rate in rates.items():
        results.backends[setting.backend] = None
        for workload in WORKLOADS:
            results.add(sample(setting, workload, rate))
    return results
