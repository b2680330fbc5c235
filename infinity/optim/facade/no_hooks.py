"""What DeepSpeed's optimizer of stage 3 shows of its hooks, where there are none to be taken off."""

from __future__ import annotations

from typing import Any

from torch import nn


class NoHooks(nn.Module):
    """Without parameters and hooks: a paged model generates as it trains, and TRL may take off what it likes.

    Attributes:
        forward_hooks, backward_hooks: Empty lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> NoHooks:
        """Where DeepSpeed has the model; this one has no parameters."""
        return self

    def ds_external_parameters(self) -> tuple[()]:
        """None."""
        return ()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Taken without effect."""
