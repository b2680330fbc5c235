"""What the plan says of times and drives, and how it gets better as steps are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from infinity.metrics import StepReport
from infinity.paging.prefetch_schedule import PrefetchSchedule
from infinity.plan.cost_model import Traffic
from infinity.plan.machine import Bandwidth
from infinity.plan.plan import Plan, PlanTracker
from infinity.plan.sizes import Request, UnitSize
from infinity.units.layout import CHUNK_GRANULE
from tests.step_reports import report
from tests.unit.plan.planned import plan_of, request_of

_SPEED = Bandwidth(2e6, 1e6, 2.5e6, "2026-01-02T03:04:05+00:00")
_NUMEL = 100 * CHUNK_GRANULE
_UNITS = [UnitSize(f"unit {index}", 2 * _NUMEL, _NUMEL, 2, True) for index in range(8)]
_REQUEST = request_of(budget_bytes=1 << 25, gradient_itemsize=2, keeps_in_memory=False)
_GUESS = [*range(8), *reversed(range(8))]


def _plan(read: int = 0, write: int = 0, request: Request = _REQUEST, **changes: Any) -> Plan:
    moved = {"predicted_read_bytes_per_step": read, "predicted_write_bytes_per_step": write}
    return plan_of(_UNITS, request, **moved, **changes)


def _report(seconds: float, compute: float, optimizer: float = 0.0, **changes: Any) -> StepReport:
    times = {"seconds": seconds, "compute_seconds": compute, "optimizer_seconds": optimizer}
    return report(1, **times, **changes)


@pytest.mark.parametrize(
    ("read", "write", "seconds"),
    [
        (4_000_000, 0, 2.0),
        (0, 4_000_000, 4.0),
        (4_000_000, 4_000_000, 4.0),  # writes alone take longer than both at the mixed rate
        (6_000_000, 2_000_000, 3.2),
        (0, 0, 0.0),
    ],
)
def test_drives_take_as_long_as_what_is_slowest(read: int, write: int, seconds: float) -> None:
    assert _plan(read, write, bandwidth=_SPEED).predicted_io_seconds == pytest.approx(seconds)


def test_a_step_takes_as_long_as_the_longer_of_drives_and_compute() -> None:
    plan = _plan(4_000_000, 0, bandwidth=_SPEED)
    assert plan.predicted_step_seconds == 2.0
    assert "at least 2.00 s" in str(plan), "nobody knows how long compute takes"
    assert dataclasses.replace(plan, compute_seconds=1.5).predicted_step_seconds == 2.0
    assert dataclasses.replace(plan, compute_seconds=2.5).predicted_step_seconds == 2.5
    assert dataclasses.replace(plan, compute_seconds=2.5, overlap_factor=1.2).predicted_step_seconds == 3.0
    assert dataclasses.replace(plan, seen_bytes_per_second=1e6).predicted_step_seconds == 4.0
    unknown = dataclasses.replace(plan, compute_seconds=2.5, bandwidth=None)
    assert unknown.predicted_step_seconds is None
    assert "infinity profile DIR" in str(unknown)
    without_drives = _plan(0, 0, compute_seconds=2.5)
    assert without_drives.predicted_step_seconds == 2.5


def test_copies_to_and_from_a_gpu_may_take_longest() -> None:
    plan = _plan(4_000_000, 0, bandwidth=_SPEED, compute_seconds=2.5)
    plan = dataclasses.replace(
        plan, predicted_upload_bytes_per_step=12_000_000, predicted_download_bytes_per_step=6_000_000
    )
    assert plan.predicted_link_seconds is None and plan.predicted_step_seconds == 2.5
    linked = dataclasses.replace(plan, link_bytes_per_second=4e6)
    assert linked.predicted_link_seconds == linked.predicted_step_seconds == 3.0
    assert "copies to and from the GPU 3.00 s, compute 2.50 s" in str(linked)
    assert dataclasses.replace(linked, link_bytes_per_second=6e6).predicted_step_seconds == 2.5


def test_the_life_of_drives() -> None:
    plan = _plan(0, 2_000_000_000, drive_tbw=600.0)
    assert plan.predicted_drive_life_steps == 300_000
    assert "300,000 steps until 600 TB are written" in str(plan)
    assert "2.000 TB written per 1000 steps" in str(_plan(0, 2_000_000_000))
    assert _plan(0, 2_000_000_000).predicted_drive_life_steps is None
    assert _plan(0, 0, drive_tbw=600.0).predicted_drive_life_steps is None


def test_the_table_says_what_rests_where() -> None:
    text = str(_plan(4_000_000, 1_000_000, bandwidth=_SPEED, compute_seconds=0.25))
    megabytes = f"{8 * 2 * _NUMEL / 1e6:.1f} MB"
    stored = f"stored on NVMe                weights {megabytes}, remainders of main weights {megabytes}, states "
    for words in (stored, "2.00 s: I/O 2.00 s", "2026-01-02", "compute 0.25 s"):
        assert words in text
    assert "stored in RAM" not in text and "micro-batches" not in text
    several = dataclasses.replace(_REQUEST, num_micro_batches=4)
    assert "4, one after the other" in str(_plan(request=several))
    assert "4, all through a unit" in str(_plan(request=several, traffic=Traffic(is_vertical=True)))


def test_a_forecast_learns_from_steps_and_the_recorded_order() -> None:
    plan_tracker = PlanTracker(_plan(bandwidth=_SPEED).predicted())
    schedule = PrefetchSchedule(_GUESS)
    first = plan_tracker.plan(schedule, Traffic())
    assert first.predicted_read_bytes_per_step > 0
    assert first.compute_seconds is None
    for seconds in (50.0, 40.0):
        plan_tracker.on_step(_report(seconds, seconds))
    assert plan_tracker.plan(schedule, Traffic()).compute_seconds is None, "the first steps do not count"
    plan_tracker.on_step(_report(9.0, 1.5))
    assert plan_tracker.plan(schedule, Traffic()).compute_seconds == pytest.approx(1.5)
    for compute, optimizer in ((1.0, 2.0), (1.2, 0.5), (1.1, 4.0)):
        plan_tracker.on_step(_report(9.0, compute, optimizer))
    assert plan_tracker.plan(schedule, Traffic()).compute_seconds == pytest.approx(3.0), "halfway between two and four"
    for _ in range(20):
        plan_tracker.on_step(_report(4.4, 1.1, drive_busy_seconds=4.0, read_bytes=8_000, write_bytes=4_000))
    assert plan_tracker.plan(schedule, Traffic()).seen_bytes_per_second == pytest.approx(3_000)
    assert plan_tracker.plan(schedule, Traffic()).overlap_factor == pytest.approx(1.1)
    schedule.begin()
    for unit in range(4):
        schedule.touch(unit)
    schedule.begin_backward()
    for unit in reversed(range(4)):
        schedule.touch(unit)
    schedule.commit()
    assert plan_tracker.plan(schedule, Traffic()).predicted_read_bytes_per_step != first.predicted_read_bytes_per_step
    assert plan_tracker.plan(schedule, Traffic()).compute_seconds == pytest.approx(1.1)


def test_pauses_of_the_script_do_not_count() -> None:
    plan_tracker, schedule = PlanTracker(_plan(bandwidth=_SPEED).predicted()), PrefetchSchedule(_GUESS)
    for step in range(12):
        pause = 30.0 * (step % 2)
        seen = {"compute_busy_seconds": 1.9, "drive_busy_seconds": 4.0, "read_bytes": 4_000_000}
        plan_tracker.on_step(_report(5.0 + pause, 2.0 + pause, **seen))
    plan = plan_tracker.plan(schedule, Traffic())
    assert plan.compute_seconds == pytest.approx(2.0)
    assert plan.overlap_factor == pytest.approx(5.0 / 4.0)
    assert plan.seen_bytes_per_second == pytest.approx(1e6)
