"""Layers computed tile by tile."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from infinity.units.tiling import Tiling

_WIDTH = 64


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
