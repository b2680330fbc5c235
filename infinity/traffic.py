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
    resumed_bytes: int = 0
    """Bytes of sums of gradients, of units used at several places, that were written before they were complete."""

    @property
    def extra_bytes(self) -> int:
        """What is written and read besides weights, states and complete gradients."""
        return self.spilled_bytes + self.resumed_bytes
