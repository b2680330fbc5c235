"""What tests of optimizers share: slices of parameters, and a comparison of bits."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from infinity.optim.probe import SLICE_ALIGNMENT
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from swapper import AlignedRegion


def page_aligned(numel: int) -> Tensor:
    """A float32 tensor whose memory starts at a page."""
    return torch.from_numpy(AlignedRegion(max(numel, 1) * 4).array()).view(torch.float32)[:numel]


def cut(numel: int, num_pieces: int, seed: int = 0) -> list[slice]:
    """Up to `num_pieces` slices that cover a parameter, starting at random multiples of the alignment."""
    inner = -(-numel // SLICE_ALIGNMENT) - 1
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randperm(inner, generator=generator)[: num_pieces - 1] + 1).tolist() if inner > 0 else []
    return [
        slice(start, stop)
        for start, stop in pairwise(sorted({0, numel, *(place * SLICE_ALIGNMENT for place in places)}))
    ]


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether all bits are the same: -0.0 is not 0.0, and NaN is NaN."""
    return left.shape == right.shape and torch.equal(
        left.detach().contiguous().view(torch.int32), right.detach().contiguous().view(torch.int32)
    )


def group_index(wrapped_optimizer: WrappedOptimizer, param: Tensor) -> int:
    """The index of the group that holds the parameter."""
    return next(
        index
        for index, group in enumerate(wrapped_optimizer.param_groups)
        if any(member is param for member in group["params"])
    )
