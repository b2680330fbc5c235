"""The results as JSON: machine, drives, settings, every sample, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swapper.measure.io_setting import IOSetting
from swapper.measure.measurement import Sample
from swapper.volumes.publish import replacing

from .advice import Advice
from .fio import FioSample
from .grid import WORKLOADS
from .places import Places
from .results import REFERENCE_RATE, Comparison, Results, median_rate
from .session import Plan
from .spread import median_interval
from .training import Outlook


def as_json(
    results: Results, plan: Plan, facts: dict[str, Any], places: Places, advice: Advice | None, outlook: Outlook | None
) -> dict[str, Any]:
    """Plain values. Rates are bytes per second, of both directions together."""
    compared = {workload: results.comparisons.get(workload) for workload in WORKLOADS}
    finished = {workload.value: each if each and each.pairs else None for workload, each in compared.items()}
    return {
        "partial": results.stopped_by is not None,
        "stopped_by": results.stopped_by,
        "machine": facts,
        "directories": [_drive(drive) for drive in places.drives],
        "remarks": [*places.remarks, *results.notes],
        "effort": asdict(plan.effort) | {"read_share_of_mixed": plan.read_share},
        "backends": {name: reason or "available" for name, reason in results.backends.items()},
        "verified": results.verified,
        "fio_engines": {name: reason or "available" for name, reason in results.engines.items()},
        "share_of_fio": {name: each.share if each else None for name, each in finished.items()},
        "share_of_fio_interval": {name: _interval(each) if each else None for name, each in finished.items()},
        "comparison": {name: _comparison(each) for name, each in finished.items() if each},
        "ours": [
            {"setting": setting_json(setting), "workload": workload.value}
            | _rates(samples)
            | {"share_of_fio": results.share_of_fio(setting, workload), "samples": [_sample(s) for s in samples]}
            for (setting, workload), samples in results.ours.items()
        ],
        "fio": [
            {"job": asdict(job), "workload": workload.value}
            | _rates(samples)
            | {"samples": [_fio_sample(s) for s in samples]}
            for (job, workload), samples in results.fio.items()
        ],
        "cores_at_2_gb_per_second": {
            backend: {workload.value: results.cores_at_reference_rate(backend, workload) for workload in WORKLOADS}
            for backend, reason in results.backends.items()
            if reason is None
        },
        "reference_rate": REFERENCE_RATE,
        "drives_alone": [asdict(each) for each in results.alone],
        "copies": [asdict(each) for each in results.copies],
        "config": None if advice is None else advice.block,
        "reasons": None if advice is None else dict(advice.reasons),
        "training": None if outlook is None else outlook.as_json(),
        "written_bytes": results.written_bytes,
    }


def setting_json(setting: IOSetting) -> dict[str, Any]:
    """A setting of ours, with what of it is really under way."""
    return asdict(setting) | {"inflight": setting.num_inflight}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As JSON that any parser reads: no NaN."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _drive(drive: Any) -> dict[str, Any]:
    return asdict(drive) | {"path": str(drive.path)}


def _rates(samples: Iterable[Sample | FioSample]) -> dict[str, float]:
    rates = [sample.bytes_per_second for sample in samples]
    return {"median": median_rate(samples), "least": min(rates), "most": max(rates)}


def _sample(sample: Sample) -> dict[str, float]:
    return {
        "read_bytes": sample.read_bytes,
        "write_bytes": sample.write_bytes,
        "seconds": sample.seconds,
        "cpu_seconds": sample.cpu_seconds,
    }


def _fio_sample(sample: FioSample) -> dict[str, float]:
    return {
        "read_bytes_per_second": sample.read_bytes_per_second,
        "write_bytes_per_second": sample.write_bytes_per_second,
        "cpu_cores": sample.cpu_cores,
    }


def _interval(comparison: Comparison) -> list[float]:
    interval = comparison.interval
    return [interval.low, interval.high, interval.level]


def _comparison(comparison: Comparison) -> dict[str, Any]:
    ours = [sample.bytes_per_second for sample, _ in comparison.pairs]
    theirs = [sample.bytes_per_second for _, sample in comparison.pairs]
    between = median_interval(comparison.ratios)
    return {
        "setting": setting_json(comparison.setting),
        "job": asdict(comparison.job),
        "pairs": [{"ours": mine, "fio": other} for mine, other in zip(ours, theirs, strict=True)],
        "ratios": comparison.ratios,
        "share": comparison.share,
        "interval": {"low": between.low, "high": between.high, "level": between.level},
    }
