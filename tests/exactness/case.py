"""A model that has to train to the same bits, and the data it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


class Draw:
    """Source of one micro-batch: the same numbers for the same moment, whatever the global generators did."""

    def __init__(self, step: int, micro_batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.step = step
        self.micro_batch = micro_batch
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(1 + 1000 * step + micro_batch)

    def floats(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers in the compute dtype."""
        return torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Token ids or labels in ``[0, high)``."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        name: fit for a pytest id.
        build: makes the model, fp32 on the CPU, for one kind of activation checkpointing (``none``, ``reentrant``,
            ``non_reentrant``). Called with the global generator seeded.
        batch: makes the keyword arguments of one forward.
        has_checkpointing: whether ``build`` makes different models for different kinds of checkpointing.
    """

    name: str
    build: Callable[[str], nn.Module]
    batch: Callable[[Draw], Batch]
    has_checkpointing: bool = True

    def make(self, checkpointing: str) -> nn.Module:
        """The model in its initial state: equal at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            return self.build(checkpointing).train()


class PlannedFailure(Exception):
    """Raised by a model whose batch says so, in the place of a fault in the user's own forward."""


def loss_of(output: Any) -> torch.Tensor:
    """The scalar to differentiate, from what a model returned."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"]
    return output.loss
