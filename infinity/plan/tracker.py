"""The plan as it is known so far: bytes from the recorded prefetch schedule, times from the steps that were made.

Knows plans, prefetch schedules and reports; must not know how anything moves.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Collection

from infinity.metrics import StepReport
from infinity.paging.prefetch_schedule import PrefetchSchedule
from infinity.plan.cost_model import Traffic
from infinity.plan.plan import Plan

_WARM_UP = 2
"""Steps that do not count: memory is fresh, kernels are chosen, the prefetch schedule is recorded."""
_REMEMBERED = 15
_ENOUGH = 4
"""Steps that tell how much a script does of its own between them."""


class PlanTracker:
    """Refines the plan that was made at start."""

    def __init__(self, plan: Plan) -> None:
        """``plan``: for the order of need that is expected before the first micro-batch is recorded."""
        self._plan = plan.predicted()
        self._reports: deque[StepReport] = deque(maxlen=_REMEMBERED)
        self._num_steps = 0
        self._least_pause = math.inf

    @property
    def first(self) -> Plan:
        """The plan as it is before anything has been recorded, or as it was last asked for."""
        return self._plan

    def plan(self, schedule: PrefetchSchedule, traffic: Traffic) -> Plan:
        """The plan, with what follows from the recorded prefetch schedule, the order of the last step, and the steps so far."""
        known = self._plan
        order, backward_start = schedule.record
        if (known.order, known.backward_start, known.traffic) != (order, backward_start, traffic):
            changed = dataclasses.replace(known, order=order, backward_start=backward_start, traffic=traffic)
            self._plan = changed.predicted()
        return self._plan

    def on_step(self, report: StepReport) -> None:
        """A step has ended. One that was skipped says nothing of the others."""
        if report.is_skipped:
            return
        self._num_steps += 1
        self._least_pause = min(self._least_pause, report.other_seconds)
        if self._num_steps <= _WARM_UP:
            return
        self._reports.append(report)
        steady = [self._without_pause(report) for report in _steady(self._reports)]
        moved = sum(report.read_bytes + report.write_bytes for report in steady)
        drive_seconds = sum(report.drive_busy_seconds for report in steady)
        longest = [max(_busy_seconds(report), report.drive_busy_seconds) for report in steady]
        factors = [report.seconds / seconds for report, seconds in zip(steady, longest, strict=True) if seconds]
        self._plan = dataclasses.replace(
            self._plan,
            seen_bytes_per_second=moved / drive_seconds if moved and drive_seconds else None,
            compute_seconds=statistics.median(_busy_seconds(report) for report in steady),
            overlap_factor=statistics.median(factors) if factors else 1.0,
        )

    def _without_pause(self, report: StepReport) -> StepReport:
        """Without what the script took before it beyond what it needs anyhow. Few steps may all have come after a pause."""
        usual = self._least_pause
        if len(self._reports) >= _ENOUGH:
            usual = statistics.median(report.other_seconds for report in _steady(self._reports))
        pause = max(0.0, report.other_seconds - usual)
        return dataclasses.replace(
            report, seconds=report.seconds - pause, compute_seconds=report.compute_seconds - pause
        )


def _steady(reports: Collection[StepReport]) -> list[StepReport]:
    """The half in which scripts did least of their own: a pause or a checkpoint before a step says nothing of the next one."""
    return sorted(reports, key=lambda report: report.other_seconds)[: (len(reports) + 1) // 2]


def _busy_seconds(report: StepReport) -> float:
    """What the training thread did not wait, the GPU, the optimizer's thread: each works beside the others."""
    return max(report.compute_seconds, report.compute_busy_seconds, report.optimizer_seconds)
