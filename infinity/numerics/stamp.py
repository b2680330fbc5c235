"""Whether memory was written to, in whatever way: checksums of contents."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from infinity.numerics.raw_bytes import raw_bytes
from infinity.torch_internals.foreign_writes import plain_array
from swapper.wrappers.checksum import crc32c, is_fast

_PIECE_BYTES = 1 << 20
"""Of a checksum: other threads run in between."""


def checksum(values: Tensor) -> int:
    """Of the bytes of a 1-D uint8 tensor."""
    array: Any = plain_array(values.cpu())
    if not is_fast():
        return zlib.crc32(array)
    return crc32c(*(array[start : start + _PIECE_BYTES] for start in range(0, len(array), _PIECE_BYTES)))


def contents_stamp(tensor: Tensor) -> int:
    """A checksum of the contents: what is written through ``.data``, numpy or some kernels counts in no version.

    Of a tensor that is not on the CPU, or sparse, the version.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor._version
    return checksum(raw_bytes(tensor))
