"""Parameters that come into the groups after `initialize`: ordinary ones in memory, trained as torch would train them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import StepError
from tests.twins import Twins, adamw


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def _twins(tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **changes: Any) -> Twins:
    torch.manual_seed(3)
    return Twins(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), make, **changes)


def _add(model: nn.Sequential, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(8, 8, dtype=dtype)
    model.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})
    return layer


def _loss(number: int, dtype: torch.dtype = torch.float32) -> Callable[[Any], torch.Tensor]:
    batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    return lambda model: model(batch).float().square().mean()


@pytest.mark.parametrize("make", [adamw, _sgd])
def test_each_state_is_there_once_and_in_torchs_order(make: Any, tmp_path: Path) -> None:
    def move(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        groups[0]["params"].insert(0, groups[1]["params"].pop())

    def count_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"] = state["step"] + 3

    with _twins(tmp_path, make) as twins:
        twins.step(_loss(0))
        twins.change(_add)
        twins.change(move)
        for number in range(1, 3):
            twins.step(_loss(number))
            names = [
                [name for key in optimizer.state for name, each in model.named_parameters() if each is key]
                for model, optimizer in twins.sides
            ]
            assert names[0] == names[1]
            twins.change(count_on)
        twins.require_equal()
        twins.optimizer.state = {}
        assert len(twins.optimizer.state) == 0


def test_with_fp16_the_norm_is_the_same_whoever_looks_at_gradients(tmp_path: Path) -> None:
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for looks in (False, True):
        with _twins(tmp_path, _sgd, fp16={"enabled": True, "loss_scale": 1024}, gradient_clipping=0.01) as twins:
            torch.manual_seed(4)
            _add(twins.model, twins.optimizer, torch.float16)
            twins.engine.backward(_loss(0, torch.float16)(twins.engine))
            if looks:
                assert twins.model[0].weight.grad.norm() > 0
            twins.engine.step()
            weights = {name: value.clone() for name, value in twins.model.state_dict().items()}
            found.append((twins.engine.get_global_grad_norm(), weights))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_states_of_16_bits_are_loaded_as_what_they_were(way: str, tmp_path: Path) -> None:
    with _twins(tmp_path / "drive", bf16={"enabled": True}) as twins:
        engine, optimizer = twins.engine, twins.optimizer
        layer = _add(twins.model, optimizer, torch.bfloat16)
        engine.backward(_loss(0, torch.bfloat16)(engine))
        engine.step()
        before = copy.deepcopy(optimizer.state[layer.weight])
        assert before["exp_avg"].dtype == torch.bfloat16
        if way == "checkpoint":
            engine.save_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved")
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        after = optimizer.state[layer.weight]
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name].dtype == value.dtype and torch.equal(after[name], value)


def test_in_a_plain_loop_gradients_are_neither_clipped_nor_exchanged(tmp_path: Path) -> None:
    with _twins(tmp_path, gradient_clipping=0.01) as twins:
        layer = _add(twins.model, twins.optimizer)
        _loss(0)(twins.model).backward()
        gradient = layer.weight.grad
        assert gradient is not None
        before = gradient.clone()
        twins.optimizer.step()
        assert twins.engine.get_global_grad_norm() > 0.01
        assert torch.equal(gradient, before)
        twins.optimizer.zero_grad(set_to_none=False)
        assert layer.weight.grad is gradient and not gradient.any()


def test_gradients_of_a_step_that_is_forgotten_are_gone(tmp_path: Path) -> None:
    with _twins(tmp_path) as twins:
        twins.change(_add)
        twins.engine.backward(_loss(0)(twins.engine))
        twins.engine.reset()
        assert twins.model[2].weight.grad is None
        twins.step(_loss(1))
        twins.require_equal()


def test_two_kinds_of_backward_in_one_step_are_refused(tmp_path: Path) -> None:
    """What comes to parameters that the engine holds is divided as it comes; to these it has come already."""
    with _twins(tmp_path, gradient_accumulation_steps=2) as twins:
        twins.change(_add)
        twins.engine.backward(_loss(0)(twins.engine))
        twins.engine.step()
        _loss(1)(twins.model).backward()
        with pytest.raises(StepError, match=r"loss\.backward\(\) and engine\.backward.*Call engine\.reset\(\)"):
            twins.engine.step()
        twins.engine.reset()
        twins.step(_loss(0), _loss(1))
        twins.require_equal()


def test_a_parameter_outside_of_the_model_is_clipped_with_it(tmp_path: Path) -> None:
    factors = {True: nn.Parameter(torch.ones(())), False: nn.Parameter(torch.ones(()))}
    norms: list[torch.Tensor] = []
    with _twins(tmp_path, gradient_clipping=0.01) as twins:

        def clip(*_: Any) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_([*twins.plain.parameters(), factors[True]], 0.01))

        twins.expected.register_step_pre_hook(clip)
        twins.change(lambda model, optimizer: optimizer.add_param_group({"params": [factors[model is twins.plain]]}))
        for number in range(3):
            twins.step(lambda model, number=number: _loss(number)(model) * factors[model is twins.plain])
            assert twins.engine.get_global_grad_norm() == float(norms[-1])
        assert torch.equal(factors[True], factors[False])


def test_sparse_gradients_stay_sparse(tmp_path: Path) -> None:
    tables = {plain: nn.Embedding(5, 8, sparse=True, _weight=torch.ones(5, 8)) for plain in (True, False)}
    words = torch.tensor([1, 3, 3])
    with _twins(tmp_path, _sgd) as twins:
        twins.change(
            lambda model, optimizer: optimizer.add_param_group(
                {"params": list(tables[model is twins.plain].parameters())}
            )
        )
        for _ in range(2):
            twins.step(lambda model: model(tables[model is twins.plain](words)).square().mean())
        assert torch.equal(tables[True].weight, tables[False].weight)
