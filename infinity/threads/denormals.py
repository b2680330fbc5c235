"""Whether the calling thread flushes denormal numbers to zero, as ``torch.set_flush_denormal`` sets it."""

from __future__ import annotations

import torch

# The smallest denormal double. Multiplied by 1.0 it stays, or becomes 0.0 if the processor flushes.
_SMALLEST = 5e-324


def flushes_denormals() -> bool:
    """Whether the calling thread does so. torch can set this, but not read it."""
    return _SMALLEST * 1.0 == 0.0


def flush_denormals(is_on: bool) -> None:
    """Make the calling thread flush denormals, or stop it."""
    # The processor keeps this flag per thread. An update worker has to have the training thread's, or bits differ.
    if (_SMALLEST * 1.0 == 0.0) != is_on:
        torch.set_flush_denormal(is_on)
