"""Keeps the plan up to date: bytes from the recorded prefetch schedule, times from the last steps."""

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

# The first steps do not count: memory is touched for the first time, kernels are chosen, the prefetch schedule is
# recorded.
_WARM_UP = 2
_REMEMBERED = 15  # steps whose times are averaged: follows changes, and one slow step does not matter
# From so many steps on, their median tells how much time a script takes between steps. Before, the shortest time
# counts.
_ENOUGH = 4


class PlanTracker:
    """Refines the plan that was made at start."""

    def __init__(self, plan: Plan) -> None:
        """``plan``: for the expected order of units, with predictions."""
        self._plan = plan
        self._reports: deque[StepReport] = deque(maxlen=_REMEMBERED)
        self._num_steps = 0
        self._least_pause = math.inf

    def plan(self, schedule: PrefetchSchedule, traffic: Traffic) -> Plan:
        """The plan for the recorded prefetch schedule and the kind of the last step, with times of the steps so far."""
        # Predicting simulates a step, so it is done only if something has changed.
        known = self._plan
        order, backward_start = schedule.record
        if (known.order, known.backward_start, known.traffic) != (order, backward_start, traffic):
            changed = dataclasses.replace(known, order=order, backward_start=backward_start, traffic=traffic)
            self._plan = changed.predicted()
        return self._plan

    def on_step(self, report: StepReport) -> None:
        """Take the times of a step that has ended. A skipped step has made no update, so it does not count."""
        if report.is_skipped:
            return
        self._num_steps += 1
        self._least_pause = min(self._least_pause, report.other_seconds)
        if self._num_steps <= _WARM_UP:
            return
        self._reports.append(report)
        steady = [self._without_pause(report) for report in _steady(self._reports)]
        # Speed of the drives: all bytes by all busy time. Compute: the median. Overlap: how far a step is from the
        # ideal, in which the longer of compute and I/O hides the other. With I/O 2 s, compute 3 s and a step of 3.6 s,
        # it is 1.2.
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
        """The report without an unusual pause of the script before the step, such as an evaluation."""
        usual = self._least_pause  # of all steps: the few counted ones may all have come after a pause
        if len(self._reports) >= _ENOUGH:
            usual = statistics.median(report.other_seconds for report in _steady(self._reports))
        pause = max(0.0, report.other_seconds - usual)
        seconds, compute_seconds = report.seconds - pause, report.compute_seconds - pause
        return dataclasses.replace(report, seconds=seconds, compute_seconds=compute_seconds)


def _steady(reports: Collection[StepReport]) -> list[StepReport]:
    """The half of the steps before which the script took least time: no pauses, evaluations or checkpoints."""
    return sorted(reports, key=lambda report: report.other_seconds)[: (len(reports) + 1) // 2]


def _busy_seconds(report: StepReport) -> float:
    """The longest of three busy times, which overlap: the training thread's, the GPU's, and the update stream's."""
    return max(report.compute_seconds, report.compute_busy_seconds, report.optimizer_seconds)
