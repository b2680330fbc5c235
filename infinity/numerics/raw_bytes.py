"""A tensor as bytes."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in C order: 1-D uint8 on its device, its own memory where that has no gaps.

    ``tensor.contiguous().view(-1).view(torch.uint8)`` fails for one element of a larger tensor (``t[:1]`` of an expanded
    one, ``t[::5]``): torch calls it contiguous with any stride.
    """
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
