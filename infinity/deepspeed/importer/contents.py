"""What a checkpoint of DeepSpeed holds, whichever of its forms it has, and what helps against one that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.arrays import ArraySpec

COPY_ALL = "Copy the whole checkpoint, the files of all ranks"
OF_ONE_SAVE = "Take the files of all ranks from one and the same save_checkpoint"
ONLY_WEIGHTS = "Load the weights alone, with infinity.load_pretrained"
ONE_STATE_DICT = "Save the weights with DeepSpeed's own tools as one state dict, and load that"
OF_DEEPSPEED = "Give a checkpoint that DeepSpeed wrote"


@dataclass(frozen=True)
class FoundTensor:
    """One tensor.

    Attributes:
        spec: as it is to be saved; the pieces may have another dtype, all of whose values this one has.
        pieces: mapped 1-D tensors which, one after the other, are its elements in C order.
    """

    spec: ArraySpec
    pieces: Sequence[torch.Tensor]

    @classmethod
    def whole(cls, group: str, fqn: str, kind: str, value: torch.Tensor) -> FoundTensor:
        """One that lies in one piece."""
        return cls(ArraySpec.of(group, fqn, kind, value.shape, value.dtype), [value.reshape(-1)])
