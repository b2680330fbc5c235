"""What modules keep beside parameters of fixed names: checkpoints and durable runs have it, or say by name what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from tests.exactness.lockstep import engine_on_nvme


class Model(nn.Module):
    """One layer, and what a test gives it."""

    def __init__(self, **buffers: torch.Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Counting(Model):
    """Has an extra state."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * self.count

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "at": torch.tensor(self.count)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        assert state["count"] == state["at"]
        self.count = state["count"]


class Growing(Model):
    """Buffers that are made, or get other shapes, while it trains; and one that is always another one's."""

    def __init__(self) -> None:
        super().__init__(mean=None, seen=torch.zeros(1))
        self.beside = nn.Module()
        self.beside.register_buffer("same", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = x.detach().mean(0)
        self.mean = here if self.mean is None else 0.9 * self.mean + here
        self.seen = self.beside.same = torch.cat([self.seen, here[:1]])
        if len(self.seen) > 3 and not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(1))
        if hasattr(self, "late"):
            self.late += 1
        return super().forward(x) + self.mean + self.beside.same.sum() + getattr(self, "late", 0)


def _engine(model: nn.Module, drive: Path, section: Mapping[str, Any] | None = None, **passed: Any) -> Any:
    drive.mkdir(exist_ok=True)
    return engine_on_nvme(drive, model, {"infinity": section or {}}, **passed)


def _steps(engine: Any, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        loss = engine(torch.randn(3, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_extra_states_are_in_checkpoints(tmp_path: Path) -> None:
    model = nn.Sequential(Model(), Counting())
    with _engine(model, tmp_path / "drive") as engine:
        _steps(engine, 1, 2, 3)
        engine.save_checkpoint(tmp_path / "saved")
        losses = _steps(engine, 4, 5)
    with _engine(nn.Sequential(Model(), Counting()), tmp_path / "drive") as engine:
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        assert engine.module[1].count == 3
        engine.load_checkpoint(tmp_path / "saved")
        assert _steps(engine, 4, 5) == losses
    with _engine(nn.Sequential(Model(), Model()), tmp_path / "drive") as engine:
        with pytest.raises(ModelError, match=r"extra states are not the model's: '1' is not in the model"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("model", [Counting, Growing])
def test_a_durable_run_has_extra_states_and_buffers_as_they_were(model: type[Model], tmp_path: Path) -> None:
    durable = {"durable": True, "keep_last": 5}
    with _engine(model(), tmp_path / "drive", durable) as engine:
        _steps(engine, 1, 2)
        losses = _steps(engine, 3, 4)
        engine.rollback(2)
        assert _steps(engine, 3, 4) == losses
        losses += _steps(engine, 5, 6)
        engine.rollback(4)
        assert _steps(engine, 3, 4) == losses[:2]
    with _engine(model(), tmp_path / "drive", durable) as engine:
        assert _steps(engine, 5, 6) == losses[2:]
        if model is Growing:
            assert engine.module.seen is engine.module.beside.same


@pytest.mark.parametrize("other", [{"renamed": torch.zeros(3)}, {"one": torch.zeros(4)}], ids=["renamed", "reshaped"])
def test_a_durable_run_of_a_model_with_other_buffers_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    with _engine(Model(one=torch.zeros(3)), tmp_path / "drive", {"durable": True}) as engine:
        _steps(engine, 1)
    with pytest.raises(ModelError, match="buffer 'one' is not the model's"):
        _engine(Model(**other), tmp_path / "drive", {"durable": True})


def test_a_scheduler_of_another_kind_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 2)])

    passed: dict[str, Any] = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    with _engine(Model(), tmp_path / "drive", {"durable": True}, **passed) as engine:
        _steps(engine, 1, 2, 3)
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.module.layer.weight.clone()
    told, model = r"is a StepLR, and this one a ChainedScheduler.*", Model()
    with pytest.raises(ValueError, match=told + r"name another infinity\.durable_path"):
        _engine(model, tmp_path / "drive", {"durable": True}, lr_scheduler=chained)
    assert "failed after it had loaded the weights of the durable run" in caplog.text
    assert torch.equal(model.layer.weight, expected)
    with _engine(Model(), tmp_path / "drive", lr_scheduler=chained) as engine:
        before = engine.module.layer.weight.clone()
        with pytest.raises(ValueError, match=told + "load_lr_scheduler_states=False"):
            engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(engine.module.layer.weight.clone(), before) and engine.global_steps == 0
        engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
        assert engine.global_steps == 3


def test_what_a_durable_run_cannot_keep_is_told(tmp_path: Path) -> None:
    engine = _engine(Model(), tmp_path / "drive", {"durable": True})
    engine.optimizer.param_groups[0]["hook"] = lambda: None
    with pytest.raises(ModelError, match="Let them hold numbers, texts, tensors"):
        _steps(engine, 1)
    engine.close(restore_weights=False)


def test_buffers_of_all_kinds_are_saved_and_loaded(tmp_path: Path) -> None:
    def buffers(value: int) -> dict[str, torch.Tensor]:
        return {
            "expanded": torch.full((1, 2), float(value)).expand(4, 2),
            "not_a_number": torch.full((1,), float("nan")).expand(3),
            "narrow": torch.full((2,), float(value)).to(torch.float8_e4m3fn),
            "complex": torch.full((3,), 1j * value),
            "nothing": torch.empty(0, 3),
            "turned": torch.arange(6.0).reshape(2, 3).t() + value,
            "large": torch.full((2,), 2**63 + value, dtype=torch.uint64),
        }

    with _engine(Model(**buffers(1)), tmp_path / "drive", {"durable": True}) as engine:
        _steps(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
    for section in ({}, {"durable": True}):
        with _engine(Model(**buffers(2)), tmp_path / "drive", section) as engine:
            if not section:
                engine.load_checkpoint(tmp_path / "saved")
            for name, expected in buffers(1).items():
                found = engine.module.get_buffer(name)
                assert found.stride() == expected.stride()
                assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (found, expected))), name


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("name", ["x" * 300, "\u4e2d" * 100, "\ud800", "a/b", "a%2Fb"])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = {each: nn.Parameter(torch.randn(4, 4)) for each in (name, f"{name}2")}
        return nn.Sequential(nn.Linear(4, 4), nn.ParameterDict(layers))

    def weights(engine: Any) -> dict[str, torch.Tensor]:
        return {fqn: parameter.clone() for fqn, parameter in engine.module.named_parameters()}

    with _engine(model(1), tmp_path / "drive") as engine:
        engine.save_checkpoint(tmp_path / "saved")
        expected = weights(engine)
    with _engine(model(2), tmp_path / "drive") as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found = weights(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
