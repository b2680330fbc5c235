"""A vertical step may leave updates whose gradients come first for the next forward: same bits, bytes as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import BudgetTooSmallError
from infinity.update import UpdateStream
from infinity.update_job import UpdateJob
from infinity.vertical import worth
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep

_OWN: dict[str, Any] = {"schedule": "vertical"}
_BF16 = {"bf16": {"enabled": True}}


@pytest.fixture(autouse=True)
def many_late_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of test models are large shares of them."""
    monkeypatch.setattr(worth, "_LATE_SHARE", 0.7)


def _changes(others: dict[str, Any], budget_bytes: int) -> dict[str, Any]:
    return {**others, "gradient_accumulation_steps": 3, "infinity": {**_OWN, "host_memory_budget": budget_bytes}}


def _least(directory: Path, others: dict[str, Any], case: str) -> int:
    with pytest.raises(BudgetTooSmallError) as refused:
        Lockstep.start(directory, case=SHAPES_BY_NAME[case], changes=_changes(others, 1))
    return refused.value.minimum_bytes


def _late(both: Lockstep) -> list[str]:
    return [both.engine._pager.units[index].name for index in sorted(both.engine.plan.placement.late_units)]


@pytest.mark.parametrize("case", ["plain", "frozen_middle", "lora", "attention", "unused_parameter"])
@pytest.mark.parametrize("others", [{}, _BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("extra", [1.5, 2.0, 3.0])
def test_the_bits_are_the_same_and_bytes_are_as_planned(
    case: str, others: dict[str, Any], extra: float, tmp_path: Path
) -> None:
    budget_bytes = int(_least(tmp_path, others, case) * extra)
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME[case], changes=_changes(others, budget_bytes)) as both:
        assert _late(both)
        assert "beside the next forward" in str(both.engine.plan)
        moved = [0, 0]
        for step in range(12):
            both.batch_step(step)
            report = both.engine.report
            assert report.schedule == "vertical", report.schedule_reason
            if step == 1:
                both.engine.flush()
            if step >= 2:
                moved = [moved[0] + report.read_bytes, moved[1] + report.write_bytes]
        both.engine.flush()
        plan = both.engine.plan
        both.require_equal()
    predicted = 10 * plan.predicted_read_bytes_per_step, 10 * plan.predicted_write_bytes_per_step
    # The last updates run after the last report; those of the step before the first one were flushed.
    assert moved[0] == pytest.approx(predicted[0], rel=0.11)
    assert moved[1] == pytest.approx(predicted[1], rel=0.11)


def test_they_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    submit = UpdateStream.submit

    def watched(self: UpdateStream, job: UpdateJob) -> None:
        order.append(job.unit.name)
        submit(self, job)

    monkeypatch.setattr(UpdateStream, "submit", watched)
    with Lockstep.start(tmp_path, changes=_changes(_BF16, 64 << 20)) as both:
        both.batch_step(0)
        for step in range(1, 4):
            order.clear()
            both.batch_step(step)
            late = _late(both)
            assert len(late) >= 2
            assert sorted(order[-len(late) :]) == late
            assert order[-len(late) :] == list(reversed(late)), "as their gradients came"
        both.require_equal()


def test_where_weights_are_read_for_it_the_plan_knows(tmp_path: Path) -> None:
    """An update after backward reads weights again that have left memory by then."""
    budget_bytes = int(_least(tmp_path, _BF16, "plain") * 1.5)
    for is_late in (False, True):
        worth._LATE_SHARE = 0.7 if is_late else 0.0
        changes = _changes(_BF16, budget_bytes)
        with Lockstep.start(tmp_path, changes=changes) as both:
            read = 0
            for step in range(33):
                both.batch_step(step)
                read += both.engine.report.read_bytes if step >= 3 else 0
            predicted = both.engine.plan.predicted_read_bytes_per_step
            assert read / 30 == pytest.approx(predicted, rel=0.02)


def test_a_step_that_is_cut_off_gives_their_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes = int(_least(tmp_path, _BF16, "plain") * 1.6)
    with Lockstep.start(tmp_path, changes=_changes(_BF16, budget_bytes)) as both:
        for step in range(2):
            both.batch_step(step)
        both.require_equal()
        pool = both.engine._parts.storage.gradient_pool
        first = next(iter(both.model.parameters()))
        handle = first.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            both.engine.train_batch(iter([both.batch(2, index) for index in range(3)]))
        handle.remove()
        both.engine.reset()
        both.engine.flush()
        both.engine._stepper.gradients._retire()
        assert pool.used_bytes == 0
        for step in range(3, 6):
            both.engine.train_batch(iter([both.batch(step, index) for index in range(3)]))
            assert both.engine.report.schedule == "vertical"


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError
