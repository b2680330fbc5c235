"""New weights of other ranks' shares come to a GPU, and those of its own go to them: nobody reads before a copy has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.internals import Shards, WeightExchange
from tests.simulated_gpu import backend
from tests.simulated_gpu.device import SimulatedGpu
from tests.unit.stage import trainable_unit

backend.register_or_skip()

_BLOCK, _BEFORE, _AFTER, _OTHERS = 512, 1.0, 2.0, 3.0
_LOST = float("nan")
"""What lies in a block's memory before it is filled, and once it is used for the next."""


class _Ranks:
    """Exchanges blocks as `Ranks.all_gather_parts` does, whose memory is used again as soon as a call has returned."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.given: list[torch.Tensor] = []

    def all_gather_ints(self, what: str, values: Sequence[int] = ()) -> None: ...

    def all_gather_parts(
        self,
        what: str,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, torch.Tensor], None],
        write: Callable[[int, torch.Tensor], None],
        **_: Any,
    ) -> None:
        for rank, (start, stop) in enumerate(parts):
            for offset in range(start, stop, _BLOCK):
                block = torch.full((min(_BLOCK, stop - offset),), _LOST if rank == self.index else _OTHERS)
                if rank == self.index:
                    read(offset, block)
                    self.given.append(block.clone())
                else:
                    write(offset, block)
                block.fill_(_LOST)


@pytest.mark.deep(but=6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("shape", [(100, 100), (40, 40)], ids=["divided", "whole"])
def test_what_is_given_and_kept_is_what_it_is_after_the_updates(shape: tuple[int, ...], index: int, seed: int) -> None:
    device, ranks, unit = SimulatedGpu(seed), _Ranks(index), trainable_unit(0, [shape])
    unit.is_persistent = True
    flat = device.allocate_flat(unit.num_bytes)
    unit.adopt(flat)
    weights = unit.trainable_view(flat.tensor())
    weights.fill_(_BEFORE)
    shares = Shards(index, 3)
    exchange = WeightExchange(ranks, shares, None, device)
    weights.fill_(_AFTER)  # an update, of which nobody on the host has seen the end
    exchange.gather(unit)
    start, stop = shares.span(unit)
    found = torch.full((weights.numel(),), _LOST)
    device.synchronize(device.download(found, weights, device.mark()))
    assert all(bool((block == _AFTER).all()) for block in ranks.given)
    assert sum(block.numel() for block in ranks.given) == stop - start
    expected = torch.full_like(found, _OTHERS)
    expected[start:stop] = _AFTER
    assert torch.equal(found, expected)
    device.end()
    assert not device.order.races
