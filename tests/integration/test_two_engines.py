"""Operations on the weights of two engines in one process: what is saved of each for backward is that engine's to keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.twins import Twins


class Product(torch.autograd.Function):
    """Saves the weights themselves."""

    @staticmethod
    def forward(ctx, u: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(u, v)
        return u * v

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        u, v = ctx.saved_tensors
        return gradient * v, gradient * u


def _all_products(a: nn.Module, b: nn.Module) -> Tensor:
    return torch.stack([(p * q).sin().sum() for p, q in zip(a.parameters(), b.parameters(), strict=True)]).sum()


def _in_a_forward(a: nn.Module, b: nn.Module) -> Tensor:
    weights = [module.weight for module in b.children() if isinstance(module, nn.Linear)]
    others = [module for module in a.children() if isinstance(module, nn.Linear)]

    def mixed(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        for weight in weights:
            output = output @ Product.apply(others[-1].weight, weight)
        return torch.tanh(b(output))

    handle = others[0].register_forward_hook(mixed)
    try:
        return a(torch.ones(3, 16)).square().sum()
    finally:
        handle.remove()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("loss_of", [_all_products, _in_a_forward])
def test_weights_of_two_engines_in_one_graph_train_as_in_torch(
    loss_of: Callable[[nn.Module, nn.Module], Tensor], tmp_path: Path
) -> None:
    pairs = [
        Twins(tmp_path / str(i), nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), is_tight=True) for i in (0, 1)
    ]
    for _ in range(2):
        expected, loss = (loss_of(*(each.sides[side][0] for each in pairs)) for side in (1, 0))
        assert torch.equal(loss, expected)
        expected.backward()
        loss.backward()
        for _, optimizer in (side for each in pairs for side in each.sides):
            optimizer.step()
            optimizer.zero_grad()
    for each in pairs:
        each.require_equal()
        each.engine.close()
