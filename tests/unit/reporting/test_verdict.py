"""What bound a run, and what the plan predicts with other means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import size
from infinity.metrics import Run, StepReport
from infinity.plan.cost_model import best_placement, predict
from infinity.plan.plan import Plan, as_record
from infinity.plan.sizes import UnitSize, guessed_order
from infinity.reporting.verdict import Alternative, _in_words, alternatives, judge
from infinity.units.layout import CHUNK_GRANULE
from tests.step_reports import report
from tests.unit.plan.planned import plan_of, request_of

_NUMEL = 4000 * CHUNK_GRANULE
_UNITS = tuple(UnitSize(f"layers.{index}", 2 * _NUMEL, _NUMEL, 2, True) for index in range(8))
_ORDER = tuple(guessed_order(8))


def known(compute_seconds: float, bytes_per_second: float, **changes: Any) -> Plan:
    """Eight units on NVMe, in a budget that holds little more than is needed."""
    request = request_of(**{"budget_bytes": 10 * _NUMEL, "gradient_itemsize": 2} | changes)
    placement = best_placement(_UNITS, request, _ORDER)
    seen = {"seen_bytes_per_second": bytes_per_second, "compute_seconds": compute_seconds}
    return plan_of(_UNITS, request, placement=placement, **seen).predicted()


def step(number: int, **changes: Any) -> StepReport:
    waits = {"seconds": 10.0, "compute_seconds": 2.0, "read_wait_seconds": 8.0, "optimizer_seconds": 1.0}
    moved = {"read_bytes": 100, "write_bytes": 90, "predicted_read_bytes": 100, "predicted_write_bytes": 90}
    busy = {"compute_busy_seconds": 2.0, "read_busy_seconds": 8.2, "write_busy_seconds": 4.0, "drive_busy_seconds": 9.0}
    others = {"loss": 2.0, "grad_norm": 1.0, "lr": (1e-3,), "forward_seconds": 0.8, "backward_seconds": 1.2}
    memory = {"host_bytes": 10**9, "host_peak_bytes": 2 * 10**9}
    return report(number, **waits | moved | busy | others | memory | changes)


def run_of(plan: Plan, num_steps: int = 6, **changes: Any) -> Run:
    steps = [step(number, **changes) for number in range(1, num_steps + 1)]
    record = json.loads(json.dumps(as_record(plan)))
    start = {"config": {"train_batch_size": 4}, "machine": {"cores": 2}}
    times = [1.7e9 + 10 * number for number in range(num_steps)]
    return Run(Path("runs/a"), start, record, steps, times, num_starts=1, has_ended=True)


def test_a_run_that_drives_bound() -> None:
    plan = known(compute_seconds=0.1, bytes_per_second=1e8)
    verdict = judge(run_of(plan))
    assert verdict.words.startswith("Reads of the optimizer state bound this run: 82 % of the step. ")
    assert (verdict.bound_by, verdict.measured_seconds) == ("read", 10.0)
    assert verdict.predicted_seconds == plan.predicted_step_seconds
    gains = {each.means: each.gain for each in verdict.alternatives}
    assert gains["a second drive"] == pytest.approx(2.0) and gains["twice the speed of computing"] == 1.0
    assert "a second drive" in verdict.words.lower() and " more RAM " in verdict.words
    assert "computing" not in verdict.words


def test_of_amounts_of_memory_that_gain_about_the_same_the_least_is_told() -> None:
    fastest_first = [
        Alternative(f"{more} GB more RAM", 10 / gain, gain) for more, gain in ((40, 1.52), (10, 1.5), (20, 1.5))
    ]
    assert _in_words(fastest_first) == "10 GB more RAM would give 1.5x."


def test_gains_are_those_of_the_cost_model() -> None:
    plan = known(compute_seconds=0.1, bytes_per_second=1e8)
    with_memory = [each for each in alternatives(plan) if "RAM" in each.means]
    half = with_memory[1]  # of what rests on drives; all of it is faster, a quarter slower
    more = round(plan.states_bytes["nvme"] / 2)
    assert len(with_memory) == 3 and f"{size(more)} more RAM" == half.means
    request = dataclasses.replace(plan.request, budget_bytes=plan.request.budget_bytes + more)
    moved = predict(_UNITS, request, best_placement(_UNITS, request, _ORDER), _ORDER, 8)
    assert half.seconds == pytest.approx((moved.read_bytes + moved.write_bytes) / 1e8)
    assert half.gain == pytest.approx((plan.predicted_step_seconds or 0) / half.seconds) and half.gain > 1.2


def test_a_run_that_computing_bound() -> None:
    plan = known(compute_seconds=10.0, bytes_per_second=1e12)
    quick = {"read_wait_seconds": 0.0, "compute_seconds": 10.0, "compute_busy_seconds": 9.1}
    verdict = judge(run_of(plan, **quick))
    assert verdict.words.startswith(
        "Computing bound this run: 91 % of the step. Twice the speed of computing would give"
    )
    assert "drive" not in verdict.words and "RAM" not in verdict.words


def test_memory_that_the_config_leaves_unused_is_told() -> None:
    plan = known(0.1, 1e8, keeps_in_memory=False, budget_bytes=60 * _NUMEL)
    gains = {each.means: each.gain for each in alternatives(plan)}
    assert gains["infinity.keep_in_memory: true"] > 1.2


def test_a_run_of_few_steps_or_of_another_version_is_not_judged_further() -> None:
    plan = known(0.1, 1e8)
    assert judge(Run(Path("a"))).words == "No step has ended yet."
    assert judge(run_of(plan, num_steps=2)).words.endswith("too few steps to say what would make them faster.")
    other = run_of(plan)
    other.plan["unknown"] = 1
    assert judge(other).alternatives == () and judge(other).words.startswith("Reads bound this run")
    unseen = dataclasses.replace(plan, seen_bytes_per_second=None, compute_seconds=None)
    assert "not known yet" in judge(run_of(unseen)).words


def test_skipped_steps_and_the_first_ones_do_not_count() -> None:
    plan = known(0.1, 1e8)
    run = run_of(plan)
    run.steps[0] = step(1, seconds=100.0)
    run.steps[4] = step(5, seconds=1000.0, is_skipped=True)
    assert judge(run).measured_seconds == 10.0


@pytest.mark.parametrize("name", ["write", "optimizer", "other"])
def test_what_else_may_bind(name: str) -> None:
    plan = known(0.1, 1e8)
    changes = {
        "write": {"write_busy_seconds": 9.5},
        "optimizer": {"optimizer_seconds": 9.5},
        "other": {"compute_seconds": 9.9, "read_wait_seconds": 0.1},
    }
    assert judge(run_of(plan, **changes[name])).bound_by == name
