"""A recomputation that reads a unit's weights without a gradient, after all of the unit's gradients have come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import StepError
from tests.exactness.lockstep import everything_on_nvme
from tests.twins import Twins


class Gated(nn.Module):
    """The checkpointed part is gated by the last block, which backward has finished with by then."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.looks_again = False
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.tanh(self.blocks[0](x))
        return torch.tanh(self.blocks[1](x)) * gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, self.blocks[2](x), use_reentrant=self.use_reentrant)
        return self.blocks[0](x).pow(2).mean()


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_late_use_is_learned_and_computes_with_the_weights_of_forward(use_reentrant: bool, tmp_path: Path) -> None:
    with Twins(tmp_path, Gated(use_reentrant=use_reentrant)) as twins:
        for step in range(4):
            twins.step(lambda model, step=step: model(_batch(step)))


class Unsteady(Gated):
    """Uses the last block in the checkpointed part only when told to, which may be between forward and backward."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks_again:
            with torch.no_grad():
                self.blocks[0](x)
        return torch.tanh(self.blocks[1](x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_unexpected_late_use_is_an_error_and_expected_from_then_on(use_reentrant: bool, tmp_path: Path) -> None:
    model = Unsteady(use_reentrant=use_reentrant)
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))

    def backward(step: int) -> None:
        model.looks_again = False
        loss = engine(_batch(step))
        model.looks_again = step >= 2
        engine.backward(loss)

    with engine:
        for step in range(2):
            backward(step)
            engine.step()
        with pytest.raises(StepError, match=r"'blocks\.0'"):
            backward(2)
        with pytest.raises(StepError, match="of 3 units"):
            engine.step()
        engine.reset()
        for step in range(3, 5):
            backward(step)
            engine.step()
        engine.flush()


class _InPieces(torch.autograd.Function):
    """A product with rows of a weight, as fused losses make it: torch does not ask a weight's class about it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.cat([inputs @ rows.t() for rows in weight.split(4)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        product = torch.empty(len(inputs), 4)
        by_weight = torch.zeros_like(weight)
        for first in range(0, len(weight), 4):
            torch.mm(inputs, weight[first : first + 4].t(), out=product)
            by_weight[first : first + 4] = gradient[:, first : first + 4].t() @ inputs
        return gradient @ weight, by_weight


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)])
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        product: torch.Tensor = _InPieces.apply(inputs, self.head.weight)
        return product.square().mean()


def test_a_function_that_is_given_a_weight_whose_module_nobody_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 64)
    with Twins(tmp_path, _Headed()) as twins:
        for _ in range(4):
            twins.step(lambda model: model(inputs))
        twins.require_equal()
