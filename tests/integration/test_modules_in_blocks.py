"""Modules inside a block that are called by themselves: by a checkpoint in the block's forward, twice, or by the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.exactness.lockstep import BF16, everything_on_nvme

_WIDTH = 16
_Run = Callable[[nn.Module, Tensor], Tensor]


def _plainly(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def _reentrantly(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(module, x, use_reentrant=True)
    return result


def _anew(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(module, x, use_reentrant=False)
    return result


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Block(nn.Module):
    """Calls the first of its modules twice, each time in a checkpoint of its own."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.shared, self.other = _Inner(), _Inner()
        self.last = nn.Linear(_WIDTH, _WIDTH)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self._run(self.shared, x)
        x = self._run(self.other, x)
        x = self._run(self.shared, torch.sin(x))
        return x + self.last(x)


class _Model(nn.Module):
    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block(run) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _make(run: _Run, dtype: torch.dtype) -> _Model:
    torch.manual_seed(0)
    return _Model(run).to(dtype)


def _losses(model: nn.Module, apart: bool, step: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss = model(x).float().square().mean()
    if apart:
        block: Any = model.blocks[1]  # type: ignore[index]
        loss = loss + block.other(torch.cos(x)).float().square().mean()
    return loss


@pytest.mark.parametrize(
    "first_apart", [99, 0, 2], ids=["in the model", "and by the script", "and by the script later"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [_plainly, _reentrantly, _anew], ids=lambda run: run.__name__.strip("_"))
def test_it_trains_to_the_same_bits(tmp_path: Path, run: _Run, dtype: torch.dtype, first_apart: int) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "infinity": {"host_memory_budget": "1MB", "page_bytes": None},
    }
    if dtype == torch.bfloat16:
        changes = {**changes, **BF16, "infinity": {**changes["infinity"], "main_weights": "fp32"}}
    plain = _make(run, dtype)
    mains = [parameter.detach().float().requires_grad_() for parameter in plain.parameters()]
    optimizer = torch.optim.AdamW(mains, lr=0.01, weight_decay=0.0, fused=True)
    config = everything_on_nvme(tmp_path, changes)
    config["optimizer"]["params"]["weight_decay"] = 0.0
    engine, *_ = infinity.initialize(model=_make(run, dtype), config=config)
    with engine:
        for step in range(4):
            loss = _losses(plain, step >= first_apart, step, dtype)
            loss.backward()
            for main, parameter in zip(mains, plain.parameters(), strict=True):
                main.grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            with torch.no_grad():
                for main, parameter in zip(mains, plain.parameters(), strict=True):
                    parameter.copy_(main)
                    parameter.grad = None
            found = _losses(engine.module, step >= first_apart, step, dtype)
            engine.backward(found)
            engine.step()
            assert torch.equal(found.detach(), loss.detach()), step
        for (name, parameter), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.detach(), expected.detach()), name


@pytest.mark.parametrize("run", [_reentrantly, _anew], ids=lambda run: run.__name__.strip("_"))
def test_modules_that_are_called_by_themselves_bring_their_unit_from_then_on(tmp_path: Path, run: _Run) -> None:
    """Else each of their operations would."""
    engine, *_ = infinity.initialize(model=_make(run, torch.float32), config=everything_on_nvme(tmp_path))
    model: Any = engine.module
    with engine:
        assert model.blocks[0]._forward_pre_hooks and not model.blocks[0].shared._forward_pre_hooks
        engine.backward(_losses(model, False, 0, torch.float32))
        engine.step()
        assert all(block.shared.up._forward_pre_hooks for block in model.blocks)
