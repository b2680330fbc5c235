"""Whether a thread's processor takes denormal numbers for zeros, as ``torch.set_flush_denormal`` sets it.

Knows the calling thread's setting; must not know who computes.
"""

from __future__ import annotations

import torch

_SMALLEST = 5e-324


def flushes_denormals() -> bool:
    """Whether the calling thread does so; torch has no question for that."""
    return _SMALLEST * 1.0 == 0.0


def flush_denormals(is_on: bool) -> None:
    """The calling thread does so from now on, or does not."""
    if (_SMALLEST * 1.0 == 0.0) != is_on:
        torch.set_flush_denormal(is_on)
