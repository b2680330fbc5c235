"""``TiledLinear``: the arguments and names of DeepSpeed's, a stated order of summation, and tiles that are units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from infinity.deepspeed.contents.tiling import TiledLinear
from infinity.errors import ModelError
from tests.twins import Twins


def _linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias)


def _input() -> Tensor:
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", [(1, 1), (1, 4), (3, 1), (5, 3), (48, 80)])
def test_results_and_gradients(splits: tuple[int, int], bias: bool) -> None:
    linear = _linear(bias)
    tiled = TiledLinear(48, 80, bias=bias, in_splits=splits[0], out_splits=splits[1], init_linear=linear)
    x, y = _input(), _input()
    torch.testing.assert_close(tiled(y), linear(x))
    linear(x).square().sum().backward()
    tiled(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), linear.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_summation_is_the_one_that_is_stated(dtype: torch.dtype) -> None:
    tiled = TiledLinear(48, 80, in_splits=3, out_splits=2, init_linear=_linear()).to(dtype)
    x = _input().to(dtype)
    a, b, c = x.split(16, dim=-1)
    expected = [(row[0](a) + row[1](b)) + row[2](c) for row in tiled.linears]
    assert torch.equal(tiled(x), torch.cat(expected, dim=-1))


def test_rows_alone_change_no_bit_of_these_results() -> None:
    linear, x = _linear(), _input()
    assert torch.equal(TiledLinear(48, 80, out_splits=5, init_linear=linear)(x), linear(x))


def test_names_and_sizes_are_those_of_deepspeed() -> None:
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2)
    assert {name: tuple(value.shape) for name, value in tiled.state_dict().items()} == {
        **{"linears.0.0.weight": (4, 4), "linears.0.1.weight": (4, 3), "linears.0.2.weight": (4, 3)},
        **{"linears.1.0.weight": (3, 4), "linears.1.1.weight": (3, 3), "linears.1.2.weight": (3, 3)},
        **{"linears.0.2.bias": (4,), "linears.1.2.bias": (3,)},
    }


@pytest.mark.parametrize("arguments", [{"in_splits": 0}, {"in_splits": 9}, {"out_splits": 0}, {"out_splits": 5}])
def test_impossible_splits(arguments: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="splits"):
        TiledLinear(8, 4, **arguments)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\(80, 48\)"):
        TiledLinear(8, 4, init_linear=_linear())
    with pytest.raises(ModelError, match="bias"):
        TiledLinear(48, 80, bias=False, init_linear=_linear())


class _Model(nn.Module):
    def __init__(self, out_splits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        large = nn.Linear(64, 2048)
        self.up = large if out_splits == 1 else TiledLinear(64, 2048, out_splits=out_splits, init_linear=large)
        self.down = nn.Linear(2048, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def test_a_layer_that_is_too_large_for_the_budget_trains_in_tiles(tmp_path: Path) -> None:
    with Twins(tmp_path, _Model(16), is_tight=True) as twins, Twins(tmp_path, _Model(1), is_tight=True) as whole:
        assert twins.engine.plan.host_budget_bytes < 0.5 * whole.engine.plan.host_budget_bytes
        for number in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
            twins.step(lambda model, x=x: model(x))
        twins.require_equal()
        replacement = nn.Linear(64, 2048)
        twins.model.up.copy_params_from(replacement)
        with torch.no_grad():
            x = torch.randn(2, 64)
            torch.testing.assert_close(twins.model.up(x), replacement(x))
