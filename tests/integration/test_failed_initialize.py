"""A failed `initialize` leaves model and optimizer as they were, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.lockstep import BF16, everything_on_nvme

_IN_MEMORY: dict[str, Any] = {"zero_optimization": {"offload_param": None, "offload_optimizer": None}}


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
        infinity.initialize(model=model, config=everything_on_nvme(tmp_path, {**place, **changes}), lr_scheduler=_fail)
    assert _facts(model) == before
    assert all(buffer is buffers[fqn] for fqn, buffer in model.named_buffers())
    assert not model._forward_pre_hooks and model.first.weight._backward_hooks
    hook.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW], ids=["adagrad", "adamw"])
def test_an_optimizers_state_comes_back(make: Callable[..., torch.optim.Optimizer], steps: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    with pytest.raises(ZeroDivisionError):
        infinity.initialize(
            model=model,
            optimizer=optimizer,
            config=everything_on_nvme(tmp_path, {"optimizer": None}),
            lr_scheduler=_fail,
        )
    assert optimizer.state.keys() == before.keys()
    for parameter, state in before.items():
        found = optimizer.state[parameter]
        assert all(torch.equal(found[name], value) for name, value in state.items())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
