"""How wide a gradient is while it waits for its update."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch

from infinity.units.layout import Slot


@dataclass(frozen=True)
class MainGradDtype:
    """In which dtype gradients wait for their update."""

    dtype: torch.dtype = torch.float32
    """fp32, or bf16 if that is the compute dtype."""
    rounds: bool = False
    """Whether the sum of several gradients may be rounded to ``dtype``. Without, it is kept as fp32."""

    def after(
        self, current: torch.dtype, gradients: Mapping[Slot, torch.Tensor], present: Container[int]
    ) -> torch.dtype:
        """What a unit's gradients of dtype ``current`` have to become when ``gradients`` are added to them."""
        if self.rounds or current == torch.float32:
            return current
        is_exact = all(g.dtype == current and slot.index not in present for slot, g in gradients.items())
        return current if is_exact else torch.float32
