"""The results as JSON: machine, drives, settings, every sample, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infinity.io_profile.advice import Advice
from infinity.io_profile.arguments import Asked
from infinity.io_profile.fio import FioSample
from infinity.io_profile.grid import READ_SHARE, WORKLOADS
from infinity.io_profile.results import REFERENCE_RATE, Comparison, Results, median_rate
from swapper.measure.io_setting import IOSetting
from swapper.measure.measurement import Sample
from swapper.volumes.publish import replacing


def as_json(
    results: Results, asked: Asked, facts: dict[str, Any], advice: Advice | None, training: dict[str, Any] | None
) -> dict[str, Any]:
    """Plain values. Rates are bytes per second, of both directions together."""
    compared = {each: results.comparisons[each] for each in WORKLOADS if each in results.comparisons}
    compared = {workload: each for workload, each in compared.items() if each.pairs}
    return {
        "partial": results.stopped_by is not None,
        "stopped_by": results.stopped_by,
        "machine": facts,
        "directories": [asdict(drive) | {"path": str(drive.path)} for drive in asked.places.drives],
        "remarks": [*asked.places.remarks, *results.notes],
        "effort": asdict(asked.effort) | {"read_share_of_mixed": READ_SHARE},
        "backends": {name: reason or "available" for name, reason in results.backends.items()},
        "verified": results.verified,
        "fio_engines": {name: reason or "available" for name, reason in results.engines.items()},
        "share_of_fio": {each.value: compared[each].share if each in compared else None for each in WORKLOADS},
        "share_of_fio_interval": {
            each.value: list(asdict(compared[each].interval).values()) if each in compared else None
            for each in WORKLOADS
        },
        "comparison": {workload.value: _comparison(each) for workload, each in compared.items()},
        "ours": [
            {"setting": setting_json(setting), "workload": workload.value}
            | _rates(samples)
            | {"share_of_fio": results.share_of_fio(setting, workload)}
            for (setting, workload), samples in results.ours.items()
        ],
        "fio": [
            {"job": asdict(job), "workload": workload.value} | _rates(samples)
            for (job, workload), samples in results.fio.items()
        ],
        "cores_at_2_gb_per_second": {
            backend: {workload.value: results.cores_at_reference_rate(backend).get(workload) for workload in WORKLOADS}
            for backend in results.verified
        },
        "reference_rate": REFERENCE_RATE,
        "drives_alone": [asdict(each) for each in results.alone],
        "copies": [asdict(each) for each in results.copies],
        "config": None if advice is None else advice.block,
        "reasons": None if advice is None else dict(advice.reasons),
        "training": training,
        "written_bytes": results.written_bytes,
    }


def setting_json(setting: IOSetting) -> dict[str, Any]:
    """A setting of ours, with what of it is really under way."""
    return asdict(setting) | {"inflight": setting.num_inflight}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As JSON that any parser reads: no NaN."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _rates(samples: Sequence[Sample] | Sequence[FioSample]) -> dict[str, Any]:
    """Median, extremes, and each sample without what all of them share."""
    rates = [sample.bytes_per_second for sample in samples]
    shared = {"setting", "job", "workload"}
    plain = [{name: value for name, value in asdict(each).items() if name not in shared} for each in samples]
    return {"median": median_rate(samples), "least": min(rates), "most": max(rates), "samples": plain}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "setting": setting_json(comparison.setting),
        "job": asdict(comparison.job),
        "pairs": [{"ours": ours.bytes_per_second, "fio": fio.bytes_per_second} for ours, fio in comparison.pairs],
        "ratios": comparison.ratios,
        "share": comparison.share,
        "interval": asdict(comparison.interval),
    }
