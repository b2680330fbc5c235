"""The bytes that a step reads from and writes to the drives are those that the plan predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.errors import BudgetTooSmallError
from tests.exactness.case import Case
from tests.exactness.covering import covering_rows, pairs
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import SHAPES_BY_NAME, engine_on_nvme, take_steps

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
        with pytest.raises(BudgetTooSmallError) as refused:
            engine_on_nvme(tmp_path, case.make("none"), {**changes, "infinity": {**own, "host_memory_budget": 1}})
        numel = sum(parameter.numel() for parameter in case.make("none").parameters())
        share = _SHARES.get(row["budget"], 0.0)
        own["host_memory_budget"] = refused.value.minimum_bytes + int(share * 16 * numel)
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
