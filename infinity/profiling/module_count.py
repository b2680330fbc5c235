"""What was counted of a module, and whatever has counted it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass
class ModuleCount:
    """What one module did in all its calls, with all that it called."""

    flops: int = 0
    """Floating-point operations of its forward."""
    seconds: float = 0.0
    """With the wait for its weights, where those are paged."""
    num_calls: int = 0


class Counted(Protocol):
    """A model of which modules were counted."""

    model: nn.Module
    ds_engine: Any
    recompute_fwd_factor: float

    def count_of(self, module: nn.Module) -> ModuleCount: ...


__all__ = ["Counted", "ModuleCount"]
