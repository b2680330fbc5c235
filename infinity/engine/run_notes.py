"""When an engine writes into the log of its run. `infinity.metrics.run_log` has the format."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

import psutil
import torch

from infinity.metrics import RunLog, StepReport
from infinity.plan.plan import Plan, as_record
from infinity.version import __version__

logger = logging.getLogger(__name__)


class RunNotes(RunLog):
    """The log of one engine."""

    # Calls get the engine: a reference to it here would keep an engine alive that nobody closed.

    _plan: Plan | None = None
    _num_steps = 0

    def start(self, engine: Any) -> None:
        """Write the first lines: config, machine and plan."""
        if self.is_open:
            self._plan = engine.plan
            config, plan = engine.config, as_record(self._plan)
            self.on_start(engine.global_steps, config.source, _machine(engine), plan, config.infinity.timeline)

    def step(self, engine: Any, report: StepReport) -> None:
        """Write a step. The scheduler has not been stepped yet."""
        if not self.is_open:
            return
        get = getattr(engine.lr_scheduler, "get_last_lr", None)
        self.on_step(report, None if get is None else [float(value) for value in get()])
        self._num_steps += 1
        # After steps 1, 2, 4, 8, ...: predictions follow the recorded prefetch schedule, and change most at first.
        if self._num_steps & (self._num_steps - 1) == 0:
            self._write_plan(engine)

    def note(self, kind: str, step: int, text: str, **more: Any) -> None:
        """Log another event, and write it."""
        logger.info("step %d: %s", step, text)
        self.write(kind, step, text=text, **more)

    def end(self, engine: Any) -> None:
        """End the log. A second call does nothing."""
        if self.is_open:
            self._write_plan(engine)
            self.close(engine.global_steps)

    def _write_plan(self, engine: Any) -> None:
        plan = engine.plan
        if plan != self._plan:
            self._plan = plan
            self.write("plan", engine.global_steps, plan=as_record(plan))


def _machine(engine: Any) -> dict[str, Any]:
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
