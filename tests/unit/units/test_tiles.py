"""Layers computed tile by tile."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from infinity.units.tiling import Tiling

_VOCABULARY, _WIDTH = 640, 64


def _tokens(number: int) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_of_weights_are_those_of_the_whole_layer(dtype: torch.dtype) -> None:
    found = []
    for above in (None, 16 << 10):
        torch.manual_seed(0)
        embed, linear = nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=5).to(dtype), nn.Linear(_WIDTH, 1000).to(dtype)
        model = nn.Sequential(embed, linear)
        tiling = Tiling(model, above, dtype.itemsize, [])
        tiling.show()
        assert bool(tiling.groups.tiled) == (above is not None)
        result = model(_tokens(0))
        result.square().mean().backward()
        tiling.undo()
        found.append((result.detach(), linear.weight.grad, linear.bias.grad, embed.weight.grad))
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if number < 2:
            assert torch.equal(one, other)
        else:  # sums over samples are made by another kernel, and the embedding's comes through the linear layer's input
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)


def test_the_gradient_of_the_input_is_summed_tile_by_tile_the_last_first() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(_WIDTH, 300, bias=False), torch.randn(8, _WIDTH, requires_grad=True)
    above, weight = torch.randn(8, 300), linear.weight.detach().clone()
    tiling = Tiling(nn.Sequential(linear), 128 * _WIDTH * 4, 4, [])
    tiling.show()
    linear(x).backward(above)
    (tiled,) = tiling.groups.tiled
    parts = [above[:, a:b] @ weight[a:b] for a, b in itertools.pairwise(tiled.cuts)]
    assert len(parts) == 3 and torch.equal(x.grad, (parts[2] + parts[1]) + parts[0])


def test_what_is_used_in_other_ways_stays_whole() -> None:
    attention, sparse = nn.MultiheadAttention(64, 4), nn.Embedding(100, 64, sparse=True)
    hooked = nn.Linear(64, 64)
    hooked.weight.register_hook(lambda gradient: gradient)
    model = nn.ModuleList([attention, sparse, nn.Conv1d(64, 64, 3), hooked, nn.LSTM(64, 64)])
    assert not Tiling(model, 1024, 4, []).groups.tiled
