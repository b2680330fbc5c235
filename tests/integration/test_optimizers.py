"""Every optimizer a user can ask for trains to the bits of the same torch optimizer on whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.deepspeed.ops.adam import FusedAdam
from tests.exactness.lockstep import PLAIN, SHAPES_BY_NAME, Lockstep, make_batch
from tests.exactness.optimizers import parameter_groups
from tests.internals import BY_NAME
from tests.twins import Twins

Named = Mapping[str, nn.Parameter]


class PaperLion(torch.optim.Optimizer):
    """Lion from the paper's Algorithm 2 (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                direction = (beta1 * momentum + (1 - beta1) * param.grad).sign()
                param.sub_(group["lr"] * (direction + group["weight_decay"] * param))
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)


def _of(cls: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: cls(list(named.values()), **settings)


_BY_NAME: dict[str, tuple[dict[str, Any], Callable[[Named], torch.optim.Optimizer]]] = {
    "Adam means AdamW": (
        {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        _of(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True),
    ),
    "Adam without adam_w_mode": (
        {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}},
        _of(torch.optim.Adam, lr=1e-3, weight_decay=0.1, fused=True),
    ),
    "AdamW": (
        {"type": "adamw", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.2}},
        _of(torch.optim.AdamW, lr=1e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2, fused=True),
    ),
    "SGD": ({"type": "SGD", "params": {"lr": 0.1}}, _of(torch.optim.SGD, lr=0.1, fused=True)),
    "SGD with momentum": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
        _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    ),
    "Adagrad": (
        {"type": "Adagrad", "params": {"lr": 0.01, "lr_decay": 0.1}},
        _of(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, fused=True),
    ),
    "RMSprop": (
        {"type": "RMSprop", "params": {"lr": 1e-3, "centered": True, "momentum": 0.5}},
        _of(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    ),
    "NAdam": ({"type": "NAdam", "params": {"lr": 1e-3}}, _of(torch.optim.NAdam, lr=1e-3)),
    "AdamW without correction for bias": (
        {"type": "AdamW", "params": {"lr": 1e-3, "bias_correction": False, "weight_decay": 0.1}},
        _of(FusedAdam, lr=1e-3, weight_decay=0.1, bias_correction=False),
    ),
    "OneBitAdam": (
        {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}},
        _of(BY_NAME["onebitadam"], lr=1e-3, freeze_step=1, fused=True),
    ),
}


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("name", _BY_NAME)
def test_optimizers_by_config_name(name: str, clipping: float, tmp_path: Path) -> None:
    section, make = _BY_NAME[name]
    changes = {"optimizer": section, "gradient_clipping": clipping}
    with Lockstep.start(tmp_path, changes=changes, reference_optimizer=make) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()


_INSTANCES: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW amsgrad": _of(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "Adam maximize": _of(torch.optim.Adam, lr=1e-4, maximize=True),
    "AdamW foreach": _of(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW fused": _of(torch.optim.AdamW, lr=1e-3, fused=True),
    "AdamW tensor lr": lambda named: torch.optim.AdamW(list(named.values()), lr=torch.tensor(1e-3)),
    "SGD momentum": _of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "Adagrad": _of(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.5),
    "RMSprop": _of(torch.optim.RMSprop, lr=1e-3),
    "NAdam": _of(torch.optim.NAdam, lr=1e-3),
    "RAdam": _of(torch.optim.RAdam, lr=1e-3),
    "Adamax": _of(torch.optim.Adamax, lr=1e-3),
    "Adadelta": _of(torch.optim.Adadelta, lr=0.5),
    "Lion of the user": _of(PaperLion, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("name", _INSTANCES)
def test_optimizers_passed_as_instances(name: str, tmp_path: Path) -> None:
    make = _INSTANCES[name]
    with Lockstep.start(
        tmp_path,
        changes={"optimizer": None},
        reference_optimizer=make,
        arguments=lambda model: {"optimizer": make(dict(model.named_parameters()))},
    ) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()


def _trainable(model: nn.Module) -> Named:
    return {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}


_SOURCES: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], Callable[[Named], torch.optim.Optimizer]]] = {
    "class": (lambda model: {"optimizer": torch.optim.AdamW}, _of(torch.optim.AdamW)),
    "class with groups": (
        lambda model: {"optimizer": torch.optim.AdamW, "model_parameters": parameter_groups(_trainable(model))},
        lambda named: torch.optim.AdamW(parameter_groups(named)),
    ),
    "callable": (
        lambda model: {"optimizer": lambda params: torch.optim.AdamW(params, lr=2e-3)},
        _of(torch.optim.AdamW, lr=2e-3),
    ),
    "callable with groups": (
        lambda model: {
            "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
            "model_parameters": parameter_groups(_trainable(model)),
        },
        # Their betas mean nothing to SGD, which keeps them in the groups.
        lambda named: torch.optim.SGD(parameter_groups(named), lr=0.05, momentum=0.9),
    ),
    "config with an iterator of parameters": (
        lambda model: {"model_parameters": iter(_trainable(model).values())},
        _of(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True),
    ),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("shape", ["plain", "lora"])
@pytest.mark.parametrize("name", _SOURCES)
def test_optimizers_passed_in_other_ways(name: str, shape: str, tmp_path: Path) -> None:
    arguments, make = _SOURCES[name]
    changes = {} if name.startswith("config") else {"optimizer": None}
    with Lockstep.start(
        tmp_path, case=SHAPES_BY_NAME[shape], changes=changes, reference_optimizer=make, arguments=arguments
    ) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()


def test_an_instance_that_has_trained_before_keeps_its_state(tmp_path: Path) -> None:
    """Steps in plain torch first, then the same optimizer handed over: its state goes along."""

    def warmed_up(model: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(**make_batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    with Twins(tmp_path, PLAIN.make("none"), warmed_up) as twins:
        for step in (1, 2):
            twins.step(lambda model, step=step: model(**make_batch(step)))
        twins.require_equal()
        assert all(int(state["step"]) == 3 for state in twins.optimizer.state.values())
