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
from tests.exactness.lockstep import everything_on_nvme
from tests.twins import Twins

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


def _loss(apart: bool, step: int) -> Callable[[Any], Tensor]:
    x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(step))

    def loss(model: Any) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found + model.blocks[1].other(torch.cos(x)).square().mean() if apart else found

    return loss


@pytest.mark.parametrize(
    "first_apart", [99, 0, 2], ids=["in the model", "and by the script", "and by the script later"]
)
@pytest.mark.parametrize("run", [_plainly, _reentrantly, _anew], ids=lambda run: run.__name__.strip("_"))
def test_it_trains_to_the_same_bits(tmp_path: Path, run: _Run, first_apart: int) -> None:
    torch.manual_seed(0)
    with Twins(tmp_path, _Model(run), infinity={"host_memory_budget": "1MB", "page_bytes": None}) as twins:
        for step in range(4):
            twins.step(_loss(step >= first_apart, step))
        twins.require_equal()


@pytest.mark.parametrize("run", [_reentrantly, _anew], ids=lambda run: run.__name__.strip("_"))
def test_modules_that_are_called_by_themselves_bring_their_unit_from_then_on(tmp_path: Path, run: _Run) -> None:
    """Else each of their operations would."""
    engine, *_ = infinity.initialize(model=_Model(run), config=everything_on_nvme(tmp_path))
    model: Any = engine.module
    with engine:
        assert model.blocks[0]._forward_pre_hooks and not model.blocks[0].shared._forward_pre_hooks
        engine.backward(_loss(False, 0)(model))
        engine.step()
        assert all(block.shared.up._forward_pre_hooks for block in model.blocks)
