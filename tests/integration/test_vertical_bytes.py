"""However many micro-batches a vertical step has, it reads and writes what a step with one does, as predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.errors import BudgetTooSmallError
from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import SHAPES_BY_NAME, engine_on_nvme, make_batch

_CASES: dict[str, Case] = {
    "plain": SHAPES_BY_NAME["plain"],
    "lora": SHAPES_BY_NAME["lora"],
    "llama": next(case for case in FAMILIES if case.name == "llama"),
    "t5": next(case for case in FAMILIES if case.name == "t5"),
}
_CHANGES: dict[str, dict[str, Any]] = {
    "free": {},
    "bf16": {"bf16": {"enabled": True}},
    "clip": {"gradient_clipping": 0.1},
    "bf16-clip": {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
}
# A single micro-batch's gradients could wait as bf16 without loss, sums cannot.
_OWN = {"schedule": "vertical", "gradient_dtype": "fp32"}
_WARM_UP = 3
_MEASURED = {1: 6, 8: 3}
"""Steps, by the number of micro-batches: what each of eight moved by itself would be seven times too much."""


def _budget(case: Case, changes: dict[str, Any], directory: Path, extra: float) -> int:
    refusing = {**changes, "infinity": {"host_memory_budget": 1, **_OWN}}
    with pytest.raises(BudgetTooSmallError) as refused:
        engine_on_nvme(directory, case.make("none"), refusing)
    return int(refused.value.minimum_bytes * extra)


def _moved(
    case: Case, changes: dict[str, Any], directory: Path, *, num_micro_batches: int, budget_bytes: int
) -> tuple[tuple[float, float], tuple[int, int], int]:
    """Bytes read and written per step, measured and predicted, and those of spilled inputs among them."""
    own = {"host_memory_budget": budget_bytes, **_OWN}
    changes = {**changes, "gradient_accumulation_steps": num_micro_batches, "infinity": own}
    engine = engine_on_nvme(directory, case.make("none"), changes)
    num_steps = _MEASURED[num_micro_batches]
    with engine:
        storage = engine._parts.storage
        for step in range(_WARM_UP + num_steps):
            if step == _WARM_UP:
                engine.flush()
                before = storage.counters()
            dtype = engine.config.compute_dtype
            batches = [make_batch(step, index, case=case, dtype=dtype) for index in range(num_micro_batches)]
            engine.train_batch(iter(batches))
            assert engine.report.schedule == "vertical", engine.report.schedule_reason
        engine.flush()  # an update may end in a later report than its own
        after = storage.counters()
        measured = after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes
        plan = engine.plan
        predicted = plan.predicted_read_bytes_per_step, plan.predicted_write_bytes_per_step
        return (measured[0] / num_steps, measured[1] / num_steps), predicted, plan.traffic.extra_bytes


# Each case with half of the changes. What the update of a half frozen fp32 unit reads when it is clipped is not predicted,
# in no order.
_ROWS = [
    (case, changes)
    for number, case in enumerate(_CASES)
    for changes in list(_CHANGES)[number % 2 :: 2]
    if (case, changes) != ("lora", "clip")
]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "changes", "budget"), [(*row, 1.0 if index % 2 else 1.5) for index, row in enumerate(_ROWS)]
)
def test_eight_micro_batches_move_the_bytes_of_one(case: str, changes: str, budget: float, tmp_path: Path) -> None:
    chosen, settings = _CASES[case], _CHANGES[changes]
    budget_bytes = _budget(chosen, settings, tmp_path, budget)
    found = {
        num: _moved(chosen, settings, tmp_path, num_micro_batches=num, budget_bytes=budget_bytes) for num in (1, 8)
    }
    # Inputs of units come on top where they find no room: they are counted, and grow with the micro-batches.
    (_, once, spilled_once), (_, often, spilled_often) = found[1], found[8]
    for direction in (0, 1):
        assert often[direction] - spilled_often == once[direction] - spilled_once
    for num_micro_batches, (measured, predicted, _) in found.items():
        for name, got, wanted in zip(("read", "written"), measured, predicted, strict=True):
            # Flushed between two steps, an update reads once what it would have found in memory in the next forward.
            tolerance = 0.01 * wanted + 0.25 * wanted / _MEASURED[num_micro_batches]
            assert abs(got - wanted) <= tolerance, f"{num_micro_batches}: {name} {got}, not {wanted}"


def test_the_first_plan_is_that_of_the_order_that_the_config_asks_for(tmp_path: Path) -> None:
    case = _CASES["llama"]
    plans = {}
    for schedule in ("ordinary", "vertical"):
        own = {"host_memory_budget": _budget(case, {}, tmp_path, 1.5), "schedule": schedule}
        changes = {"gradient_accumulation_steps": 4, "infinity": own}
        with engine_on_nvme(tmp_path, case.make("none"), changes) as engine:
            plans[schedule] = engine.plan
            assert engine.plan.traffic.is_vertical == (schedule == "vertical")
            for index in range(4):  # the user's loop goes one micro-batch after the other, whatever the config says
                engine.backward(engine(**make_batch(0, index, case=case)).loss)
                assert not engine.plan.traffic.is_vertical
                engine.step()
    assert plans["vertical"].predicted_read_bytes_per_step < plans["ordinary"].predicted_read_bytes_per_step / 2
    assert "all through a unit before the next" in str(plans["vertical"])
