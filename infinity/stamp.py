"""Whether a tensor of the user's was written to, in whatever way."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor


def contents_stamp(tensor: Tensor) -> int:
    """A checksum of the contents: what is written through ``.data``, numpy or some kernels counts in no version.

    Of a tensor that is not on the CPU, or sparse, the version.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor._version
    values: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(values)
