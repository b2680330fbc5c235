"""What the order of a step means for the bytes it moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """The order of the last step, as far as predictions depend on it."""

    is_vertical: bool = False
    """Whether all micro-batches went through a unit together."""
    spilled_bytes: int = 0
    """Bytes of units' inputs that were written to NVMe, and read again."""
