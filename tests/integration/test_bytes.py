"""The bytes that a step reads from and writes to the drives: what the plan predicts, whatever fits into memory, and those of one
micro-batch in a vertical step with many."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from swapper import AlignedRegion
from tests.exactness.case import Case
from tests.exactness.covering import covering_rows, pairs
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import (
    BF16,
    PLAIN,
    SHAPES_BY_NAME,
    engine_on_nvme,
    everything_on_nvme,
    make_batch,
    take_steps,
)
from tests.exactness.paged import least_budget
from tests.internals import EngineResources, host_memory
from tests.twins import Twins

_CASES: dict[str, Case] = {
    "plain": SHAPES_BY_NAME["plain"],
    "lora": SHAPES_BY_NAME["lora"],
    "llama": next(case for case in FAMILIES if case.name == "llama"),
}
_CHANGES: dict[str, dict[str, Any]] = {
    "free": {},
    "clip": {"gradient_clipping": 0.1},
    "ga3": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-clip": {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    "bf16-clip-ga2": {"bf16": {"enabled": True}, "gradient_clipping": 0.1, "gradient_accumulation_steps": 2},
    "bf16-ga2-rounded": {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "infinity": {"gradient_dtype": "bf16"},
    },
    "bf16-deferred-fp32-main": {
        "bf16": {"enabled": True},
        "infinity": {"update": "deferred", "main_weights": "fp32", "gradient_dtype": "fp32"},
    },
    "step": {"infinity": {"update": "step"}},
    "bf16-step": {"bf16": {"enabled": True}, "infinity": {"update": "step"}},
    "bf16-states": {"bf16": {"enabled": True}, "infinity": {"state_dtype": "bf16"}},
    "int8-states": {"bf16": {"enabled": True}, "infinity": {"state_dtype": "int8"}},
}
# Of 16 bytes per parameter, beyond the least: what stays in memory.
_SHARES = {"few": 0.15, "most": 0.8, "all": 2.0}
_AXES = {
    "case": tuple(_CASES),
    "changes": tuple(_CHANGES),
    "prefetch": (True, False),
    "budget": ("tight", "roomy", *_SHARES),
}
# Tight budgets are where predictions are hard: there, every combination with fetching ahead or not.
_HARD = [
    {"changes": changes, "prefetch": prefetch, "budget": "tight"} for changes in _CHANGES for prefetch in (True, False)
]
_ROWS = covering_rows(_AXES, [*pairs(_AXES), *_HARD])
_WARM_UP, _MEASURED = 3, 8


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("row", _ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_steady_steps_move_the_predicted_bytes(row: dict[str, Any], tmp_path: Path) -> None:
    case, changes = _CASES[row["case"]], _CHANGES[row["changes"]]
    own: dict[str, Any] = {"prefetch": row["prefetch"], **changes.get("infinity", {})}
    if row["budget"] != "roomy":
        own["keep_in_memory"] = True
        least = least_budget(case.make("none"), everything_on_nvme(tmp_path, {**changes, "infinity": own}))
        numel = sum(parameter.numel() for parameter in case.make("none").parameters())
        share = _SHARES.get(row["budget"], 0.0)
        own["host_memory_budget"] = least + int(share * 16 * numel)
    engine = engine_on_nvme(tmp_path, case.make("none"), {**changes, "infinity": own})
    predicted = [0, 0]
    with engine:
        storage = engine._parts.storage
        for step in range(_WARM_UP + _MEASURED):
            if step == _WARM_UP:
                engine.flush()
                before = storage.counters()
            take_steps(engine, step, case=case)
            if step >= _WARM_UP:
                report = engine.report
                predicted = [predicted[0] + report.predicted_read_bytes, predicted[1] + report.predicted_write_bytes]
        engine.flush()  # an update may end in a later report than its own
        after = storage.counters()
    moved = after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes
    for name, got, wanted in zip(("read", "written"), moved, predicted, strict=True):
        # A view that lives an instant longer than expected changes what is evicted next.
        assert abs(got - wanted) <= 0.05 * wanted, f"{name}: {got / _MEASURED} per step, predicted {wanted / _MEASURED}"


_VERTICAL_CASES = {**_CASES, "t5": next(case for case in FAMILIES if case.name == "t5")}
_VERTICAL_CHANGES = ("free", "bf16", "clip", "bf16-clip")
# A single micro-batch's gradients could wait as bf16 without loss, sums cannot.
_VERTICAL = {"schedule": "vertical", "gradient_dtype": "fp32"}
_VERTICAL_MEASURED = {1: 6, 8: 3}
"""Steps, by the number of micro-batches: what each of eight moved by itself would be seven times too much."""


def _budget(case: Case, changes: dict[str, Any], directory: Path, extra: float) -> int:
    config = everything_on_nvme(directory, {**changes, "infinity": _VERTICAL})
    return int(least_budget(case.make("none"), config) * extra)


def _moved(
    case: Case, changes: dict[str, Any], directory: Path, *, num_micro_batches: int, budget_bytes: int
) -> tuple[tuple[float, float], tuple[int, int], int]:
    """Bytes read and written per step, measured and predicted, and those of spilled inputs among them."""
    own = {"host_memory_budget": budget_bytes, **_VERTICAL}
    changes = {**changes, "gradient_accumulation_steps": num_micro_batches, "infinity": own}
    engine = engine_on_nvme(directory, case.make("none"), changes)
    num_steps = _VERTICAL_MEASURED[num_micro_batches]
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
_VERTICAL_ROWS = [
    (case, changes)
    for number, case in enumerate(_VERTICAL_CASES)
    for changes in _VERTICAL_CHANGES[number % 2 :: 2]
    if (case, changes) != ("lora", "clip")
]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "changes", "budget"), [(*row, 1.0 if index % 2 else 1.5) for index, row in enumerate(_VERTICAL_ROWS)]
)
def test_eight_micro_batches_move_the_bytes_of_one(case: str, changes: str, budget: float, tmp_path: Path) -> None:
    chosen, settings = _VERTICAL_CASES[case], _CHANGES[changes]
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
            tolerance = 0.01 * wanted + 0.25 * wanted / _VERTICAL_MEASURED[num_micro_batches]
            assert abs(got - wanted) <= tolerance, f"{num_micro_batches}: {name} {got}, not {wanted}"


def test_the_first_plan_is_that_of_the_order_that_the_config_asks_for(tmp_path: Path) -> None:
    case = _VERTICAL_CASES["llama"]
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


_MODES: dict[str, dict[str, Any]] = {
    "in_backward": {},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "ga3": {"gradient_accumulation_steps": 3, "infinity": {"schedule": "ordinary"}},
}


def _kept(mode: str, **own: Any) -> dict[str, Any]:
    changes = {**BF16, **_MODES[mode]}
    return {**changes, "infinity": {"keep_in_memory": True, **changes.get("infinity", {}), **own}}


def _reports(engine: Any, num_steps: int) -> list[Any]:
    reports = []
    for step in range(num_steps):
        take_steps(engine, step)
        reports.append(engine.report)
    return reports


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", _MODES)
def test_what_fits_touches_no_drive(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    open_swapper = EngineResources._open

    def opened(self: EngineResources, key: Any, num_bytes: int) -> Any:
        reserved.append(num_bytes)
        return open_swapper(self, key, num_bytes)

    monkeypatch.setattr(EngineResources, "_open", opened)
    with engine_on_nvme(tmp_path, PLAIN.make("none"), _kept(mode)) as engine:
        reports = _reports(engine, 3)
        counters = engine._parts.storage.counters()
    assert (counters.read_bytes, counters.write_bytes) == (0, 0), "not even at start"
    assert reserved == [0]
    assert all(report.predicted_read_bytes == report.predicted_write_bytes == 0 for report in reports)
    assert engine.plan.states_bytes["nvme"] == 0


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("share", "warns"), [(2.0, True), (0.5, False)])
def test_a_plan_beyond_the_memory_that_there_is_warns(
    share: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is too large for the machine does no harm as long as the model does not fill it."""
    config = everything_on_nvme(tmp_path, _kept("in_backward", host_memory_budget="10TB"))
    model = PLAIN.make("none")
    with infinity.initialize(model=PLAIN.make("none"), config=config)[0] as engine:
        taken = sum(engine.plan.states_bytes.values())
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    monkeypatch.setattr(host_memory, "free_bytes", lambda: int(taken / share) - model_bytes)
    with caplog.at_level("WARNING"), infinity.initialize(model=model, config=config)[0]:
        pass
    said = [record.message for record in caplog.records if "host_memory_budget" in record.message]
    assert bool(said) == warns
    assert all("are free" in message and '"auto"' in message for message in said)


@pytest.mark.parametrize(("tier", "momentum"), [("cpu", 0.0), ("nvme", 0.9)])
def test_gradients_that_are_clipped_stay_within_the_smallest_budget(tier: str, momentum: float, tmp_path: Path) -> None:
    """Those of units of different sizes take turns in memory, and states of no bytes take none."""
    before = AlignedRegion.mapped_bytes()
    model = nn.Sequential(*[nn.Linear(*widths) for widths in ((40, 500), (500, 40), (40, 200), (200, 40), (40, 7))])
    place = {"device": tier, **({"nvme_path": str(tmp_path)} if tier == "nvme" else {})}
    zero = {"offload_param": place, "offload_optimizer": place}
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    with Twins(tmp_path, model, lambda model: make(model.parameters()), is_tight=True, zero_optimization=zero) as twins:
        for _ in range(3):
            for side, optimizer in twins.sides:
                side(torch.ones(2, 40)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(side.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            assert twins.engine.report.buffers_peak_bytes - before <= twins.engine.plan.host_budget_bytes
        twins.require_equal(has_states=momentum > 0)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def test_inputs_of_units_leave_memory_when_backward_has_used_them(tmp_path: Path) -> None:
    """Of twelve, two are in memory, or four where threads are late, though the collector of cycles does not run."""
    before = AlignedRegion.mapped_bytes()
    batch = torch.ones(8, 512, 12)
    model = nn.Sequential(*[_Residual() for _ in range(6)])
    changes = {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical", "staging_buffer_bytes": None}}
    budget = least_budget(model, everything_on_nvme(tmp_path, changes))
    changes["infinity"]["host_memory_budget"] = budget  # type: ignore[index]
    with engine_on_nvme(tmp_path, model, changes) as engine:
        copies: list[weakref.ref[torch.Tensor]] = []

        def loss(output: torch.Tensor, taken: tuple[torch.Tensor]) -> torch.Tensor:
            copies.append(weakref.ref(taken[0]))
            return output.square().mean()

        gc.disable()
        try:
            engine.train_batch(iter([(batch,), (batch,)]), loss_fn=loss)
            assert [copy() for copy in copies] == [None, None]
        finally:
            gc.enable()
        assert engine.report.schedule == "vertical", engine.report.schedule_reason
        assert engine.report.buffers_peak_bytes - before <= budget + 4 * batch.nbytes
