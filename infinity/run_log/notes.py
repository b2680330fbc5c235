"""What an engine writes down of its run: into the run's log, if the config names one.

Knows when something is written; must not know how (`infinity.run_log`).
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from infinity.config import InfinityConfig
from infinity.plan.plan import Plan, Workload, as_record
from infinity.run_log.writer import RunLog
from infinity.telemetry import StepReport
from infinity.version import __version__

logger = logging.getLogger(__name__)


class Running(Protocol):
    """An engine, as far as it is needed here."""

    config: InfinityConfig
    global_steps: int
    lr_scheduler: Any

    @property
    def plan(self) -> Plan: ...

    @property
    def workload(self) -> Workload: ...

    @property
    def device(self) -> torch.device: ...


class RunNotes:
    """Of one engine."""

    def __init__(self, directory: Path | None) -> None:
        """``directory``: of the log; None: nothing is written.

        Raises:
            ConfigError: it cannot be written there.
        """
        self._log = None if directory is None else RunLog(directory)
        self._plan: Plan | None = None
        self._num_steps = 0

    def start(self, engine: Running) -> None:
        """The engine is complete."""
        if self._log is not None:
            machine = _machine(engine)
            self._plan = engine.plan
            plan = as_record(engine.workload, self._plan)
            self._log.note_start(
                engine.global_steps, engine.config.source, machine, plan, engine.config.infinity.timeline
            )

    def step(self, engine: Running, report: StepReport) -> None:
        """A step has ended, and the scheduler has not moved yet."""
        if self._log is None:
            return
        get = getattr(engine.lr_scheduler, "get_last_lr", None)
        self._log.note_step(report, None if get is None else [float(value) for value in get()])
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:  # what is predicted gets better, at first quickly
            self._note_plan(engine)

    def note(self, kind: str, step: int, text: str, **more: Any) -> None:
        """Something else has happened."""
        logger.info("step %d: %s", step, text)
        if self._log is not None:
            self._log.write(kind, step, text=text, **more)

    def close(self, engine: Running) -> None:
        """The run ends. May be called again."""
        if self._log is not None:
            self._note_plan(engine)
            self._log.close(engine.global_steps)

    def abandon(self) -> None:
        """The engine was never complete."""
        if self._log is not None:
            self._log.abandon()

    def _note_plan(self, engine: Running) -> None:
        plan = engine.plan
        if self._log is not None and plan != self._plan:
            self._plan = plan
            self._log.write("plan", engine.global_steps, plan=as_record(engine.workload, plan))


def _machine(engine: Running) -> dict[str, Any]:
    device = engine.device
    return {
        "infinity": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_processes": engine.config.world_size,
    }
