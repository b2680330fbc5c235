"""DeepSpeed's module ``checkpointing``: activation checkpointing, by torch's own."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

_configured: list[bool] = []


def checkpoint(function: Any, *args: Any) -> Any:
    """``torch.utils.checkpoint``, reentrant, as DeepSpeed's is: ``function`` runs once more in backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
    """``torch.utils.checkpoint``, non-reentrant."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*args: Any, **kwargs: Any) -> None:
    """Taken as DeepSpeed takes it; activations are not partitioned, and stay where torch leaves them."""
    _configured[:] = [True]


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Without effect: there are no buffers."""
