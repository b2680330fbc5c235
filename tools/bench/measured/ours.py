"""The measured program on our side: `infinity.initialize` with everything on NVMe."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from .models import Program, Workload, build_model, micro_batches


def make_config(workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON config of the run: DeepSpeed's keys plus our budget."""
    place = {"device": settings.get("device", "nvme")}
    if place["device"] == "nvme":
        place["nvme_path"] = settings.get("drives") or settings["directory"]
    return workload.config() | {
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {
            "host_memory_budget": settings["budget"],
            "timeline": settings.get("timeline"),
            **settings.get("infinity", {}),
        },
    }


class Ours(Program):
    """Drives the engine one optimizer step at a time."""

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        from infinity.entry import initialize
        from infinity.loading.init import Init

        self._workload = workload
        self._timeline = settings.get("timeline")
        self._reports: list[Any] = []
        self._moved, self._counts = (0, 0), bool(settings.get("counts_bytes"))
        config = make_config(workload, settings)
        # For models that do not fit into memory: weights go to the drive as they are made.
        with Init(config_dict_or_path=config) if settings.get("builds_on_drive") else contextlib.nullcontext():
            model = build_model(workload, settings.get("build_on", "cpu"))
        self._engine, *_ = initialize(model=model, config=config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._batches = micro_batches(workload, device)

    def step(self) -> float:
        """Runs one optimizer step through `train_batch`, which takes one call per micro-batch, and returns the mean loss."""
        loss = float(self._engine.train_batch(self._batches))
        report = self._engine.report
        self._reports.append(report)
        self._moved = (self._moved[0] + report.read_bytes, self._moved[1] + report.write_bytes)
        return loss

    def moved_bytes(self) -> tuple[int, int] | None:
        """Return the bytes of the engine's reports so far. Bytes that a flush moves count in the next step."""
        return self._moved if self._counts else None

    def flush(self) -> None:
        """Waits for every pending update and write-back, so that a turn's time holds all of its work."""
        self._engine.flush()

    def take_reports(self) -> list[dict[str, Any]]:
        """Return the engine's reports since the last call, and write the timeline if there is one.

        The first step of a turn is left out, if it has more: its report begins at the end of the turn before, and holds
        the flush and the other participants' turns.
        """
        reports, self._reports = self._reports, []
        if self._timeline is not None:
            self._engine.save_timeline(self._timeline)
        # A turn of one step has only that one report.
        return [_plain(report) | _shards(report) for report in reports[1:] or reports]

    def describe(self) -> dict[str, Any]:
        """The engine's plan and last report, as far as they are plain numbers."""
        plan, report = self._engine.plan, self._engine.report
        return {
            "num_parameters": plan.num_parameters,
            "host_budget_bytes": plan.host_budget_bytes,
            "minimum_budget_bytes": plan.minimum_budget_bytes,
            "predicted_read_bytes": plan.predicted_read_bytes_per_step,
            "predicted_write_bytes": plan.predicted_write_bytes_per_step,
            "plan": str(plan),
            "last_report": _plain(report),
        }

    def close(self) -> None:
        """Releases the volumes."""
        # The process ends: weights need not go back into the model.
        self._engine.close(restore_weights=False)


def _shards(report: Any) -> dict[str, Any]:
    names = ("compute_share", "drive_busy_share", "read_busy_share", "write_busy_share", "optimizer_share")
    return {name: getattr(report, name) for name in names} | {"bound_by": report.bound_by}


def _plain(report: Any) -> dict[str, Any]:
    if not is_dataclass(report) or isinstance(report, type):
        return {"text": str(report)}
    return {key: value for key, value in asdict(report).items() if isinstance(value, int | float | str | None)}
