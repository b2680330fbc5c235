"""What the budget keeps in memory does not go to the drives, and needs no room there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.exactness.lockstep import BF16, PLAIN, engine_on_nvme, everything_on_nvme, take_steps
from tests.internals import EngineResources, host_memory

_MODES: dict[str, dict[str, Any]] = {
    "in_backward": {},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "ga3": {"gradient_accumulation_steps": 3, "infinity": {"schedule": "ordinary"}},
}


def _changes(mode: str, **own: Any) -> dict[str, Any]:
    changes = {**BF16, **_MODES[mode]}
    return {**changes, "infinity": {"keep_in_memory": True, **changes.get("infinity", {}), **own}}


def _train(engine: Any, num_steps: int) -> list[Any]:
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
    with engine_on_nvme(tmp_path, PLAIN.make("none"), _changes(mode)) as engine:
        reports = _train(engine, 3)
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
    config = everything_on_nvme(tmp_path, _changes("in_backward", host_memory_budget="10TB"))
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
