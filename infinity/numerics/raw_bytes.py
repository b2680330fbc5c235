"""A tensor as bytes, and their checksum."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from swapper.wrappers.checksum import crc32c, is_fast

_PIECE_BYTES = 1 << 20
"""Of a checksum: other threads run in between."""


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in C order: 1-D uint8 on its device, its own memory where that has no gaps.

    ``tensor.contiguous().view(-1).view(torch.uint8)`` fails for one element of a larger tensor (``t[:1]`` of an expanded
    one, ``t[::5]``): torch calls it contiguous with any stride.
    """
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def checksum(values: torch.Tensor) -> int:
    """Of the bytes of a 1-D uint8 tensor."""
    array: Any = values.cpu().numpy()
    if not is_fast():
        return zlib.crc32(array)
    return crc32c(*(array[start : start + _PIECE_BYTES] for start in range(0, len(array), _PIECE_BYTES)))
