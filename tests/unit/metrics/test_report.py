"""What a report says: shares, what bounds a step, one line in words; and the clock that its seconds come from."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity.metrics.clock
from infinity.device.compute import Copy
from infinity.errors import ConfigError
from infinity.metrics import StepReport
from infinity.metrics.clock import StepClock
from infinity.metrics.reporter import DriveCounters, Reporter
from infinity.metrics.timeline import Row, Timeline
from tests.step_reports import report


def _example(seconds: float = 4.2, **changes: Any) -> StepReport:
    """The step of the example in the documentation."""
    waits = {"compute_seconds": 2.2, "read_wait_seconds": 1.9, "update_wait_seconds": 0.1, "optimizer_seconds": 0.8}
    moved = {"read_bytes": 2_300_000_000, "write_bytes": 2_100_000_000}
    busy = {"compute_busy_seconds": 2.15, "read_busy_seconds": 4.03, "write_busy_seconds": 3.7}
    return report(12, **{"seconds": seconds, **waits, **moved, **busy, "drive_busy_seconds": 4.07} | changes)


def test_the_line_of_a_step() -> None:
    assert (
        str(_example())
        == _example().describe()
        == (
            "step 12: 4.2 s | compute 51 % | drive busy 97 % (read 96 %, write 88 %) | 2.3 GB read, 2.1 GB written | "
            "waited: reads 1.9 s, optimizer 0.1 s | bound by reads"
        )
    )


def test_the_line_of_a_step_with_copies_and_without_waiting() -> None:
    quick = _example(
        0.042, compute_seconds=0.042, read_wait_seconds=0, update_wait_seconds=0, compute_busy_seconds=0.04,
        read_busy_seconds=0.01, write_busy_seconds=0, drive_busy_seconds=0.01, read_bytes=999, write_bytes=0,
        copy_busy_seconds=0.021,
    )  # fmt: skip
    assert quick.describe() == (
        "step 12: 0.042 s | compute 95 % | drive busy 24 % (read 24 %, write 0 %) | copies 50 % | "
        "999 bytes read, 0 bytes written | waited: nothing | bound by compute"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "read"),
        ({"write_busy_seconds": 4.1}, "write"),
        ({"read_busy_seconds": 1.0, "write_busy_seconds": 1.0, "optimizer_seconds": 3.0}, "optimizer"),
        ({"read_busy_seconds": 2.0, "write_busy_seconds": 1.0}, "compute"),
        # It hardly waits: whatever the drive does beside it, a faster one would not help.
        ({"compute_seconds": 4.1, "compute_busy_seconds": 4.0}, "compute"),
        # A slow data loader.
        ({"compute_seconds": 4.1, "compute_busy_seconds": 1.0}, "other"),
        (
            {"compute_busy_seconds": 0.1, "compute_seconds": 3.4, "read_busy_seconds": 2, "write_busy_seconds": 1},
            "other",
        ),
    ],
)
def test_bound_by(changes: dict[str, float], expected: str) -> None:
    assert _example(**changes).bound_by == expected


# ---------------------------------------------------------------------------------------------------------- the clock


_PREDICTION = (1, 2, 0.5)


class _Stamps:
    """A device that runs behind the host: it tells when a point was passed only as far as it has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.has_passed = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds_at(self, stamp: float) -> float | None:
        return stamp if stamp <= self.has_passed else None


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> _Stamps:
    """The host's clock and the device's."""
    stamps = _Stamps()
    monkeypatch.setattr(infinity.metrics.clock, "time", SimpleNamespace(perf_counter=lambda: stamps.now))
    return stamps


def _clock(stamps: Any) -> tuple[StepClock, Timeline]:
    timeline = Timeline(Path(tempfile.gettempdir()) / "trace.json")
    return StepClock(stamps, timeline), timeline


def _row(timeline: Timeline, row: Row) -> list[tuple[str, float, float]]:
    return [(span.name, span.begin_seconds, span.end_seconds) for span in timeline.spans() if span.row is row]


def test_computing_is_cut_where_it_waits_and_named_by_unit(stamps: _Stamps) -> None:
    stamps.has_passed = 1e9
    clock, timeline = _clock(stamps)
    stamps.now = 1
    clock.begin_compute("forward")
    stamps.now = 2
    clock.pause_compute()
    stamps.now = 3
    clock.resume_compute("layer 0")
    stamps.now = 5
    with clock.waiting("update"):
        assert clock.waiting_for == "the optimizer"
        stamps.now = 8
    stamps.now = 9
    clock.end_compute()
    stamps.now = 20
    clock.begin_compute("backward")
    clock.begin_compute("backward")
    stamps.now = 21
    clock.end_compute()
    clock.end_compute()
    assert _row(timeline, Row.COMPUTE) == [
        ("forward", 1, 2),
        ("forward layer 0", 3, 5),
        ("forward layer 0", 8, 9),
        ("backward", 20, 21),
    ]
    assert _row(timeline, Row.WAITING) == [("the optimizer", 5, 8)]
    assert clock.compute_seconds == 5
    assert clock.waited_seconds["update"] == 3
    assert clock.reset() == 21
    assert clock.compute_seconds == 0


def test_a_wait_that_fails_counts_all_the_same(stamps: _Stamps) -> None:
    clock, _ = _clock(stamps)
    with pytest.raises(OSError, match="gone"), clock.waiting("read"):
        stamps.now = 2
        raise OSError("gone")
    assert clock.waited_seconds["read"] == 2
    assert clock.waiting_for == ""


def test_a_device_behind_the_host_is_counted_when_it_has_come_so_far(stamps: _Stamps) -> None:
    clock, timeline = _clock(stamps)
    clock.begin_compute("forward")
    stamps.now = 2
    clock.end_compute()
    clock.begin_compute("backward")
    stamps.now = 6
    clock.end_compute()
    assert clock.compute_seconds == 0
    stamps.has_passed = 3
    clock.collect_events()
    assert clock.compute_seconds == 2
    stamps.has_passed = 6
    clock.collect_events()
    assert clock.compute_seconds == 6
    assert _row(timeline, Row.COMPUTE) == [("forward", 0, 2), ("backward", 2, 6)]


# ------------------------------------------------------------------------------------------------------- the reporter


class _Engine:
    """Everything a reporter asks, as numbers."""

    def __init__(self, **options: Any) -> None:
        self.counted = DriveCounters()
        self.optimizer_seconds = 0.0
        self.copies: list[tuple[Copy, float, float]] = []
        self.clock = StepClock()
        self.reporter = Reporter(
            self.clock,
            lambda: self.counted,
            lambda: self.optimizer_seconds,
            self._take,
            lambda: (5, 7, None, 3),
            num_processes=2,
            **options,
        )

    def _take(self) -> list[tuple[Copy, float, float]]:
        taken, self.copies = self.copies, []
        return taken


def test_a_report_is_the_difference_of_two_moments() -> None:
    engine = _Engine()
    reporter = engine.reporter
    engine.counted = DriveCounters(100, 200, 1.0, 2.0, 2.5)
    engine.copies = [(Copy("upload", 1, 0, 0), 0.0, 100.0)]
    reporter.begin()
    engine.counted = DriveCounters(150, 210, 1.25, 2.5, 3.25)
    engine.optimizer_seconds = 0.5
    engine.copies = [(Copy("upload", 8, 0, 0), 100.0, 101.0), (Copy("download", 8, 0, 0), 100.5, 101.5)]
    engine.clock.compute_seconds = 0.125
    first = reporter.end_step(1, None, prediction=_PREDICTION)
    assert (first.read_bytes, first.write_bytes) == (50, 10)
    assert (first.read_busy_seconds, first.write_busy_seconds, first.drive_busy_seconds) == (0.25, 0.5, 0.75)
    assert (first.optimizer_seconds, first.copy_busy_seconds, first.compute_busy_seconds) == (0.5, 1.5, 0.125)
    second = reporter.end_step(2, None, prediction=_PREDICTION)
    assert (second.read_bytes, second.drive_busy_seconds, second.copy_busy_seconds) == (0, 0, 0)
    assert (second.optimizer_seconds, second.compute_busy_seconds) == (0, 0)


def test_a_report_has_the_sizes_of_its_micro_batches_and_the_seconds_of_its_phases() -> None:
    engine = _Engine()
    reporter = engine.reporter
    reporter.begin()
    for phase in ("forward", "backward", "forward", "step"):
        engine.clock.begin_compute(phase)
    engine.clock.end_compute()
    seconds = dict(engine.clock.phase_seconds)
    for _ in range(2):
        reporter.on_micro_batch(3, 12)
    first = reporter.end_step(1, None, prediction=_PREDICTION, lr=(0.1, 0.2), loss_scale=8.0)
    assert (first.forward_seconds, first.backward_seconds, first.update_seconds) == tuple(seconds.values())
    assert first.compute_busy_seconds == pytest.approx(sum(seconds.values())) and min(seconds.values()) > 0
    assert (first.lr, first.loss_scale, first.num_samples, first.num_tokens) == ((0.1, 0.2), 8.0, 12, 48)
    assert (first.host_bytes, first.host_peak_bytes, first.device_peak_bytes) == (5, 7, None)
    assert first.buffers_peak_bytes == 3
    reporter.on_micro_batch(3, None)
    second = reporter.end_step(2, None, prediction=_PREDICTION, num_samples=100)
    assert (second.num_samples, second.num_tokens, second.forward_seconds) == (6, None, 0), "those that were seen"
    third = reporter.end_step(3, None, prediction=_PREDICTION, num_samples=100)
    assert (third.num_samples, third.num_tokens) == (100, None)
    assert reporter.end_step(4, None, prediction=_PREDICTION).num_samples is None


def test_batches_of_an_order_that_was_given_up_do_not_count() -> None:
    reporter = _Engine().reporter
    for _ in range(3):  # two of which the vertical schedule had begun with
        reporter.on_micro_batch(1, 4)
    reporter.on_loss(torch.tensor(1.0), 0)
    assert reporter.end_step(1, None, prediction=_PREDICTION).num_tokens == 8, "on two processes"


def test_the_breakdown_is_one_line_a_step(caplog: pytest.LogCaptureFixture) -> None:
    reporter = _Engine(steps_per_print=2, prints_breakdown=True).reporter
    reporter.begin()
    with caplog.at_level(logging.INFO, logger="infinity"):
        reports = [reporter.end_step(step, None, prediction=_PREDICTION) for step in (1, 2)]
    lines = [record.message for record in caplog.records]
    assert lines[0] == reports[0].describe()
    assert lines[1].startswith("step 2: loss None")
    assert lines[2] == reports[1].describe()


def test_a_timeline_that_was_not_asked_for_cannot_be_saved(tmp_path: Any) -> None:
    reporter = _Engine().reporter
    with pytest.raises(ConfigError, match=r"infinity\.timeline.*no timeline is recorded"):
        reporter.save_timeline(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
