"""Optimizers that count in their groups, or treat groups differently: bits, groups and states of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.twins import Twins


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
    return [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}, {"params": [unused], "lr": 0.03}]


_MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "schedule-free": lambda model: ScheduleFree(_in_groups(model)),
    "a tensor that counts": lambda model: ScheduleFree(
        [{**group, "k": torch.tensor(0)} for group in _in_groups(model)]
    ),
    "counts what trains": lambda model: CountsWhatTrains(_in_groups(model)),
}


def _loss(number: int) -> Callable[[Any], torch.Tensor]:
    inputs = torch.randn(4, 70, generator=torch.Generator().manual_seed(number))
    return lambda model: model(inputs)


def _twins(make: Callable[[nn.Module], Optimizer], drive: Path, **settings: Any) -> Twins:
    own = {"page_bytes": None, **settings}
    twins = Twins(drive, Net(), make, gradient_accumulation_steps=2, infinity=own)
    if isinstance(twins.expected, ScheduleFree):
        twins.change(lambda _, optimizer: optimizer.train())
    return twins


def _step(twins: Twins, step: int) -> None:
    twins.step(_loss(2 * step), _loss(2 * step + 1))


def _require_equal(twins: Twins) -> None:
    twins.require_equal()
    assert twins.optimizer.state_dict()["param_groups"] == twins.expected.state_dict()["param_groups"]


@pytest.mark.parametrize("update", ["in_backward", "deferred", "step"])
@pytest.mark.parametrize("name", _MAKE)
def test_groups_weights_and_states_are_those_of_torch(name: str, update: str, tmp_path: Path) -> None:
    with _twins(_MAKE[name], tmp_path, update=update) as twins:
        for step in range(5):
            _step(twins, step)
            assert twins.optimizer.param_groups[0].get("k", step + 1) == step + 1
        _require_equal(twins)


def test_schedule_free_evaluates_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    with _twins(_MAKE["schedule-free"], tmp_path / "drive") as twins:
        engine = twins.engine
        for step in range(3):
            _step(twins, step)
        twins.change(lambda _, optimizer: optimizer.eval())
        _require_equal(twins)
        engine.backward(_loss(0)(engine))
        engine.step()
        with pytest.raises(RuntimeError, match=r"call optimizer\.train"):
            engine.backward(_loss(0)(engine))
        engine.reset()
        _require_equal(twins)
        with torch.no_grad():
            assert torch.equal(_loss(0)(engine.eval()), _loss(0)(twins.plain))
        engine.train()
        engine.save_checkpoint(tmp_path / "saved")
        saved = copy.deepcopy((twins.plain.state_dict(), twins.expected.state_dict()))
        twins.change(lambda _, optimizer: optimizer.train())
        _step(twins, 3)
        _require_equal(twins)
        engine.load_checkpoint(tmp_path / "saved")
        assert twins.optimizer.param_groups[0]["k"] == 3 and not twins.optimizer.param_groups[0]["train_mode"]
        twins.plain.load_state_dict(saved[0])
        twins.expected.load_state_dict(saved[1])
        twins.change(lambda _, optimizer: optimizer.train())
        _step(twins, 3)
        _require_equal(twins)
