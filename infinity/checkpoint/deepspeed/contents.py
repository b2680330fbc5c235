"""What a checkpoint of DeepSpeed holds, whichever of its forms it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FoundTensor:
    """One tensor.

    Attributes:
        group: "parameters" or "buffers".
        fqn: of the parameter or buffer.
        kind: "weight", or the name of an optimizer state.
        shape: of the whole.
        dtype: that it is to have; the pieces may have another one that it holds exactly.
        pieces: mapped 1-D tensors which, one after the other, are its elements in C order.
    """

    group: str
    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Of all elements, as they are written."""
        return sum(piece.numel() for piece in self.pieces) * self.dtype.itemsize


@dataclass(frozen=True)
class FoundGroup:
    """One group of the optimizer.

    Attributes:
        settings: hyperparameters.
        fqns: of its parameters.
    """

    settings: Mapping[str, Any]
    fqns: Sequence[str]


@dataclass(frozen=True)
class Contents:
    """All of a checkpoint.

    Attributes:
        tensors: weights (the fp32 main weight of a trained parameter), states and buffers.
        groups: of the optimizer.
        scalars: FQN of a trained parameter with states -> those that are one number.
        lr_scheduler: its state; None without one.
        counters: steps and samples, and the loss scale.
        client_state: what the script had added.
        left_out: what of the checkpoint has no place in ours.
        tied: further FQN of a parameter -> the one that has the tensor.
    """

    tensors: Sequence[FoundTensor]
    groups: Sequence[FoundGroup]
    scalars: Mapping[str, Mapping[str, Any]]
    lr_scheduler: Mapping[str, Any] | None
    counters: Mapping[str, Any]
    client_state: Mapping[str, Any]
    left_out: Sequence[str]
    tied: Mapping[str, str]


__all__ = ["Contents", "FoundGroup", "FoundTensor"]
