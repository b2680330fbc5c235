"""What the update stream asks of an optimizer.

Pure interface; ``infinity.optim`` has what fulfils it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class PieceUpdater(Protocol):
    """Runs the optimizer's rule on one piece (see ``infinity.optim.piece``)."""

    def update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor] | None,
        scalars: Mapping[str, Any],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...


class HalvesUpdater(Protocol):
    """The same rule for main weights kept in two halves (see ``infinity.optim.remainder_updater``)."""

    @property
    def is_fused(self) -> bool:
        """Whether it goes in a kernel of ours, on one thread."""
        ...

    def update(
        self,
        group: Mapping[str, Any],
        weight: torch.Tensor,
        remainder: torch.Tensor,
        gradient: torch.Tensor,
        scale: torch.Tensor | None,
        state: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        *,
        is_first: bool,
    ) -> tuple[tuple[str, ...], dict[str, Any]]: ...
