"""What is left after an engine was closed, left by an exception, or dropped, and after an `initialize` that failed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import AccessError, EngineClosedError, InfinityError, StepError
from tests.exactness.lockstep import BF16, PLAIN, Lockstep, engine_on_nvme, everything_on_nvme, make_batch, take_steps
from tests.states import state_of

_IN_MEMORY: dict[str, Any] = {"zero_optimization": {"offload_param": None, "offload_optimizer": None}}


def test_leaving_the_with_block_closes(tmp_path: Path) -> None:

    num_threads = threading.active_count()
    with Lockstep.start(tmp_path) as both, both.engine as engine:
        both.engine_step(0)
        assert engine is both.engine
    assert threading.active_count() <= num_threads
    assert os.listdir(tmp_path) == []
    for call in (
        lambda: engine(**make_batch(0)),
        engine.step,
        lambda: engine.train_batch(iter([make_batch(0)])),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.flush,
        both.optimizer.step,
        lambda: engine.save_16bit_model(tmp_path / "out"),
        lambda: state_of(engine, next(both.model.parameters())),
    ):
        with pytest.raises(EngineClosedError):
            call()
    engine.close()
    assert not (tmp_path / "out").exists()


def test_an_engine_that_only_evaluates_makes_way_for_one_that_trains(tmp_path: Path) -> None:
    """TRL takes reference values by one that it never closes. Weights go from drive to drive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 8))
    inputs = torch.randn(4, 512)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    output = model(inputs).detach()
    evaluating = engine_on_nvme(tmp_path, model, {"optimizer": None})
    with torch.no_grad():
        assert torch.equal(evaluating(inputs), output)
    with pytest.raises(StepError, match="eval_on_start=True"):
        evaluating.backward(evaluating(inputs).sum())
    evaluating.close_for_next()
    assert evaluating.is_closed
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not model[0].weight.untyped_storage().resizable(), "it is the memory of a file"
    evaluating = engine_on_nvme(tmp_path, model, {"optimizer": None})
    engine = engine_on_nvme(tmp_path, model, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    plain = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 8))
    plain.load_state_dict(expected)
    with engine:
        engine.backward(engine(inputs).square().mean())
        engine.step()
        plain(inputs).square().mean().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert torch.equal(engine(inputs), plain(inputs))
    assert evaluating.is_closed
    assert os.listdir(tmp_path) == []


def test_what_a_library_has_closed_names_the_cure_in_that_library(tmp_path: Path) -> None:
    """transformers calls ``destroy`` before each training, and goes on with the engine that it has."""
    engine, *_ = infinity.deepspeed.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path))
    engine.destroy()
    with pytest.raises(EngineClosedError, match=r"second trainer\.train.*make another Trainer"):
        engine(**make_batch(0))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_the_model_is_an_ordinary_one_after_the_with_block(
    changes: dict[str, Any], place: dict[str, Any], tmp_path: Path
) -> None:
    with Lockstep.start(tmp_path, changes={**changes, **place}) as both, both.engine:
        both.engine_step(0)
        both.engine_step(1)
    for fqn, param in both.model.named_parameters():
        assert type(param) is nn.Parameter and param.requires_grad
        assert torch.equal(param, both.reference.model.get_parameter(fqn)), fqn
    batch = both.batch(2)
    assert torch.equal(both.model(**batch), both.reference.forward(batch))
    assert os.listdir(tmp_path) == []


def test_weights_are_not_given_back_when_that_is_not_wanted(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine.close(restore_weights=False)
    with pytest.raises(InfinityError):
        both.model(**make_batch(0))


def test_an_engine_that_is_dropped_leaves_nothing_behind(tmp_path: Path) -> None:

    engine = engine_on_nvme(tmp_path, PLAIN.make("none"))
    weight = engine.module.get_parameter("blocks.0.up.weight")
    take_steps(engine, 0)
    engine.flush()
    del engine
    gc.collect()
    assert os.listdir(tmp_path) == []
    with pytest.raises(AccessError, match="after its engine was dropped"):
        weight.sum()


class Odd(nn.Module):
    """Parameters of all dtypes, trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.wide = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(9).half())
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.with_nan = nn.Parameter(torch.tensor([0x7FC00001, 0x3F800001], dtype=torch.int32).view(torch.float32))
        frozen = {
            "counts": torch.tensor([2**24 + 1, 2**53 + 1, -(2**62) - 1]),
            "bytes": torch.arange(5, dtype=torch.uint8),
            "mask": torch.tensor([True, False]),
            "phases": torch.randn(3, dtype=torch.complex64),
            "exact_phases": torch.randn(3, dtype=torch.complex128),
            "single": torch.randn(4, 6),
            "fine": torch.randn(4, dtype=torch.float64),
            "brain": torch.randn(4).bfloat16(),
            "expanded": torch.full((1,), 1 / 3, dtype=torch.float64).expand(4),
        }
        for name, value in frozen.items():
            setattr(self, f"frozen_{name}", nn.Parameter(value, requires_grad=False))
        self.register_buffer("table", torch.randn(3, 3))
        self.register_buffer("number", torch.tensor(2**40 + 1))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).sum()


def _raw(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _facts(model: nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        fqn: (type(t), t.dtype, t.stride(), t.requires_grad, _raw(t), None if t.grad is None else _raw(t.grad))
        for fqn, t in tensors.items()
    }


def _fail(optimizer: torch.optim.Optimizer) -> Any:
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::infinity.errors.OtherNumbersWarning")  # fp64 parameters are trained in fp32
@pytest.mark.parametrize("changes", [{}, BF16, {"fp16": {"enabled": True}}], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
def test_every_dtype_comes_back_bit_for_bit(place: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    model = Odd()
    model.first.weight.grad = torch.randn(8, 8)
    hook = model.first.weight.register_hook(lambda gradient: gradient * 2)
    buffers = dict(model.named_buffers())
    before = _facts(model)
    with pytest.raises(ZeroDivisionError):
        engine_on_nvme(tmp_path, model, {**place, **changes}, lr_scheduler=_fail)
    assert _facts(model) == before
    assert all(buffer is buffers[fqn] for fqn, buffer in model.named_buffers())
    assert not model._forward_pre_hooks and model.first.weight._backward_hooks
    hook.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW], ids=["adagrad", "adamw"])
def test_an_optimizers_state_comes_back(make: Callable[..., torch.optim.Optimizer], steps: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    before = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    with pytest.raises(ZeroDivisionError):
        engine_on_nvme(tmp_path, model, optimizer=optimizer, lr_scheduler=_fail)
    assert optimizer.state.keys() == before.keys()
    for parameter, state in before.items():
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in state.items())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
