"""Optimizers that count in their groups, or treat groups differently: bits, groups and states of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import infinity
from tests.exactness.lockstep import everything_on_nvme


class ScheduleFree(Optimizer):
    """As AdamWScheduleFree of Meta's package schedulefree, with its names."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        counts = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "warmup_steps": 3, **counts})

    @torch.no_grad()
    def _move(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["betas"][0]
                        p.lerp_(end=self.state[p]["z"], weight=1 - beta if is_training else 1 - 1 / beta)
                group["train_mode"] = is_training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call optimizer.train() first")
        for group in self.param_groups:
            k = int(group["k"])
            lr = group["lr"] * min((k + 1) / group["warmup_steps"], 1.0)
            group["scheduled_lr"] = lr
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])
                grad = p.grad / state["exp_avg_sq"].div(1 - group["betas"][1] ** (k + 1)).sqrt().add_(1e-8)
                p.lerp_(end=state["z"], weight=share)
                p.add_(grad, alpha=lr * (group["betas"][0] * (1 - share) - 1))
                state["z"].sub_(grad, alpha=lr)
            group["k"] += 1  # of a tensor: in place


class CountsWhatTrains(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rounds": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            group["rounds"] += bool(present)
            for p in present:
                p.sub_(p.grad, alpha=group["lr"] / group["rounds"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(70, 70) for _ in range(3)])
        self.head = nn.Linear(70, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(inputs).relu()).square().mean()
        return result


def _in_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    unused = named.pop("unused")
    matrices = [p for p in named.values() if p.dim() == 2]
    others = [p for p in named.values() if p.dim() < 2]
    return [
        {"params": matrices, "use_muon": True, "lr": 0.02},
        {"params": others, "use_muon": False, "lr": 0.01},
        {"params": [unused], "use_muon": False, "lr": 0.03},
    ]


def _without_muon(model: nn.Module) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "use_muon"} for group in _in_groups(model)]


_MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "schedule-free": lambda model: ScheduleFree(_without_muon(model)),
    "a tensor that counts": lambda model: ScheduleFree(
        [{**group, "k": torch.tensor(0)} for group in _without_muon(model)]
    ),
    "counts what trains": lambda model: CountsWhatTrains(_without_muon(model)),
}


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 70, generator=torch.Generator().manual_seed(step))


class _Both:
    """A training by the engine and one by plain torch."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], drive: Path, **settings: Any) -> None:
        self.model, self.plain = Net(), Net()
        given, self.expected = make(self.model), make(self.plain)
        config = everything_on_nvme(
            drive, {"optimizer": None, "infinity": {"page_bytes": None, **settings}, "gradient_accumulation_steps": 2}
        )
        self.engine, self.optimizer, *_ = infinity.initialize(model=self.model, config=config, optimizer=given)
        if isinstance(self.expected, ScheduleFree):
            self.optimizer.train()
            self.expected.train()

    def step(self, step: int) -> None:
        for part in range(2):
            self.engine.backward(self.engine(_batch(2 * step + part)))
            self.engine.step()
            (self.plain(_batch(2 * step + part)) / 2).backward()
        self.expected.step()
        self.expected.zero_grad()

    def require_equal(self) -> None:
        for name, value in self.plain.state_dict().items():
            assert torch.equal(self.engine.module.state_dict()[name], value), name
        found, expected = self.optimizer.state_dict(), self.expected.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        present = {key: entry for key, entry in expected["state"].items() if entry}
        assert found["state"].keys() == present.keys()
        for key, entry in present.items():
            for name, value in entry.items():
                assert torch.equal(torch.as_tensor(found["state"][key][name]), torch.as_tensor(value)), (key, name)


@pytest.mark.parametrize("update", ["in_backward", "deferred", "step"])
@pytest.mark.parametrize("name", _MAKE)
def test_groups_weights_and_states_are_those_of_torch(name: str, update: str, tmp_path: Path) -> None:
    both = _Both(_MAKE[name], tmp_path, update=update)
    with both.engine:
        for step in range(5):
            both.step(step)
            assert both.optimizer.param_groups[0].get("k", step + 1) == step + 1
        both.require_equal()


def test_schedule_free_evaluates_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    both = _Both(_MAKE["schedule-free"], tmp_path / "drive")
    with both.engine:
        for step in range(3):
            both.step(step)
        for optimizer in (both.optimizer, both.expected):
            optimizer.eval()
        both.require_equal()
        both.engine.backward(both.engine(_batch(0)))
        both.engine.step()
        with pytest.raises(RuntimeError, match=r"call optimizer\.train"):
            both.engine.backward(both.engine(_batch(0)))
        both.engine.reset()
        both.require_equal()
        with torch.no_grad():
            assert torch.equal(both.engine.eval()(_batch(0)), both.plain(_batch(0)))
        both.engine.train()
        both.engine.save_checkpoint(tmp_path / "saved")
        for optimizer in (both.optimizer, both.expected):
            optimizer.train()
        state = {name: value.clone() for name, value in both.plain.state_dict().items()}
        both.step(3)
        both.require_equal()
        both.engine.load_checkpoint(tmp_path / "saved")
        assert both.optimizer.param_groups[0]["k"] == 3 and not both.optimizer.param_groups[0]["train_mode"]
        both.optimizer.train()
        for name, value in state.items():
            assert torch.equal(both.engine.module.state_dict()[name], value), name
        both.engine.backward(both.engine(_batch(6)))
        both.engine.step()
        both.engine.backward(both.engine(_batch(7)))
        both.engine.step()
        both.require_equal()
