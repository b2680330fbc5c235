"""DeepSpeed's module ``comm`` for one process: what several would do together is done."""

from __future__ import annotations

from typing import Any

import torch

from infinity.distributed.collectives import init_distributed, is_initialized


def get_rank(group: Any = None) -> int:
    """0: there is one process."""
    return 0


def get_local_rank() -> int:
    """0: there is one process."""
    return 0


def get_world_size(group: Any = None) -> int:
    """1: there is one process."""
    return 1


def barrier(*args: Any, **kwargs: Any) -> None:
    """Nobody else has to arrive."""


def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """The sum, mean, least or largest of one tensor is that tensor."""


def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """It is where it has to be."""


__all__ = [
    "all_reduce",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]
