"""Parameters that come into the groups after `initialize`: ordinary ones in memory, trained as torch would train them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StepError
from tests.exactness.lockstep import everything_on_nvme

_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1)


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _start(tmp_path: Path, make: _Make = _adamw, **changes: Any) -> tuple[Any, Any, nn.Sequential]:
    model = _model()
    config = everything_on_nvme(tmp_path, {"optimizer": None, **changes})
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, optimizer=make(model.parameters()))
    return engine, optimizer, model


def _twin(make: _Make = _adamw) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = _model()
    return model, make(model.parameters())


def _add(model: nn.Sequential, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(4)
    layer = nn.Linear(8, 8, dtype=dtype)
    model.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})
    return layer


def _batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _step(engine: Any, number: int, dtype: torch.dtype = torch.float32) -> None:
    engine.backward(_loss(engine(_batch(number, dtype))))
    engine.step()


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    _loss(model(_batch(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", [_adamw, _sgd])
def test_each_state_is_there_once_and_in_torchs_order(make: _Make, tmp_path: Path) -> None:
    engine, optimizer, model = _start(tmp_path, make)
    twin, plain = _twin(make)
    with engine:
        _step(engine, 0)
        _plain_step(twin, plain, 0)
        for its, side in ((model, optimizer), (twin, plain)):
            _add(its, side)
            side.param_groups[0]["params"].insert(0, side.param_groups[1]["params"].pop())
        for number in range(1, 3):
            _step(engine, number)
            _plain_step(twin, plain, number)
            names = [
                [name for key in side.state for name, each in its.named_parameters() if each is key]
                for its, side in ((model, optimizer), (twin, plain))
            ]
            assert names[0] == names[1]
            for side in (optimizer, plain):
                for state in side.state.values():
                    state["step"] = state["step"] + 3
        for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(one, other)
        optimizer.state = {}
        assert len(optimizer.state) == 0


def test_with_fp16_the_norm_is_the_same_whoever_looks_at_gradients(tmp_path: Path) -> None:
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for looks in (False, True):
        fp16 = {"enabled": True, "loss_scale": 1024}
        engine, optimizer, model = _start(tmp_path, _sgd, fp16=fp16, gradient_clipping=0.01)
        with engine:
            _add(model, optimizer, torch.float16)
            engine.backward(_loss(engine(_batch(0, torch.float16))))
            if looks:
                assert model[0].weight.grad.norm() > 0
            engine.step()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            found.append((engine.get_global_grad_norm(), weights))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_states_of_16_bits_are_loaded_as_what_they_were(way: str, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    engine, optimizer, model = _start(tmp_path / "drive", bf16={"enabled": True})
    with engine:
        layer = _add(model, optimizer, torch.bfloat16)
        _step(engine, 0, torch.bfloat16)
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
        _step(engine, 1, torch.bfloat16)


def test_in_a_plain_loop_clipping_does_not_show_in_gradients(tmp_path: Path) -> None:
    engine, optimizer, model = _start(tmp_path, gradient_clipping=0.01)
    with engine:
        layer = _add(model, optimizer)
        _loss(model(_batch(0))).backward()
        before = layer.weight.grad.clone()
        optimizer.step()
        assert engine.get_global_grad_norm() > 0.01
        assert torch.equal(layer.weight.grad, before)


def test_gradients_that_are_set_to_zero_stay_the_same_tensors(tmp_path: Path) -> None:
    engine, optimizer, model = _start(tmp_path)
    with engine:
        layer = _add(model, optimizer)
        _loss(model(_batch(0))).backward()
        gradient = layer.weight.grad
        optimizer.zero_grad(set_to_none=False)
        assert layer.weight.grad is gradient and not gradient.any()


def test_gradients_of_a_step_that_is_forgotten_are_gone(tmp_path: Path) -> None:
    engine, optimizer, model = _start(tmp_path)
    twin, plain = _twin()
    with engine:
        layer, other = _add(model, optimizer), _add(twin, plain)
        engine.backward(_loss(engine(_batch(0))))
        engine.reset()
        assert layer.weight.grad is None
        _step(engine, 1)
        _plain_step(twin, plain, 1)
        assert torch.equal(layer.weight, other.weight)


def test_two_kinds_of_backward_in_one_step_are_refused(tmp_path: Path) -> None:
    """What comes to parameters that the engine holds is divided as it comes; to these it has come already."""
    engine, optimizer, model = _start(tmp_path, gradient_accumulation_steps=2)
    with engine:
        _add(model, optimizer)
        _step(engine, 0)
        _loss(model(_batch(1))).backward()
        with pytest.raises(StepError, match=r"loss\.backward\(\) and engine\.backward.*Call engine\.reset\(\)"):
            engine.step()
        engine.reset()
        for number in range(2):
            _step(engine, number)


def test_a_parameter_outside_of_the_model_is_clipped_with_it(tmp_path: Path) -> None:
    engine, optimizer, _ = _start(tmp_path, gradient_clipping=0.01)
    twin, plain = _twin()
    with engine:
        factors = [nn.Parameter(torch.ones(())) for _ in range(2)]
        for side, factor in zip((optimizer, plain), factors, strict=True):
            side.add_param_group({"params": [factor]})
        for number in range(3):
            engine.backward(_loss(engine(_batch(number)) * factors[0]))
            engine.step()
            _loss(twin(_batch(number)) * factors[1]).backward()
            norm = torch.nn.utils.clip_grad_norm_([*twin.parameters(), factors[1]], 0.01)
            plain.step()
            plain.zero_grad()
            assert engine.get_global_grad_norm() == float(norm)
        assert torch.equal(*factors)


def test_sparse_gradients_stay_sparse(tmp_path: Path) -> None:
    engine, optimizer, _ = _start(tmp_path, _sgd)
    twin, plain = _twin(_sgd)
    words = torch.tensor([1, 3, 3])
    with engine:
        tables = [nn.Embedding(5, 8, sparse=True, _weight=torch.ones(5, 8)) for _ in range(2)]
        for side, table in zip((optimizer, plain), tables, strict=True):
            side.add_param_group({"params": list(table.parameters())})
        for _ in range(2):
            engine.backward(_loss(engine(tables[0](words))))
            engine.step()
            _loss(twin(tables[1](words))).backward()
            plain.step()
            plain.zero_grad()
        assert torch.equal(tables[0].weight, tables[1].weight)
