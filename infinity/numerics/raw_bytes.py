"""A tensor as bytes, and their checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from swapper.wrappers.checksum import crc32c, is_fast

_PIECE_BYTES = 1 << 20  # Bytes per call of crc32c, which holds the GIL: other threads run in between.


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in C order: 1-D uint8 on its device, its own memory where that has no gaps.

    ``tensor.contiguous().view(-1).view(torch.uint8)`` fails for one element of a larger tensor (``t[:1]`` of an expanded
    one, ``t[::5]``): torch calls it contiguous with any stride.
    """
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def rows_of(value: torch.Tensor, num_bytes: int) -> Iterator[torch.Tensor]:
    """The elements of any strided tensor in C order, 1-D and on the CPU, in rows of about ``num_bytes`` together."""
    whole = value.detach().resolve_conj().resolve_neg()
    whole = whole if whole.dim() else whole.reshape(1)  # a scalar has no rows
    num = max(num_bytes // max(whole[:1].nbytes, 1), 1)
    for start in range(0, whole.shape[0] if whole.numel() else 0, num):
        yield whole[start : start + num].cpu().contiguous().reshape(-1)


def checksum(values: torch.Tensor) -> int:
    """The checksum of a 1-D uint8 tensor."""
    # Without its C extension google_crc32c is a loop in Python; zlib's CRC-32 is compiled everywhere.

    array: Any = values.cpu().numpy()
    if not is_fast():
        return zlib.crc32(array)
    return crc32c(*(array[start : start + _PIECE_BYTES] for start in range(0, len(array), _PIECE_BYTES)))
