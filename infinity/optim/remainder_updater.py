"""Updating a piece of a parameter whose main weight is kept as a bf16 model weight and a remainder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from infinity.numerics.remainder import join, split
from infinity.optim.fused_adam import STATES, FusedAdam
from infinity.optim.piece import PieceUpdater

_BLOCK_NUMEL = 1 << 18
"""Elements joined at a time on the CPU, without a kernel of ours: few enough to stay in the processor's cache."""


class _Scratch(threading.local):
    main: Tensor | None = None
    gradient: Tensor | None = None


class RemainderUpdater:
    """Runs the optimizer on two halves instead of a main weight, with the bits that `PieceUpdater` would give.

    Fused Adam and AdamW go in one pass over memory. Everything else is joined, updated by torch and split
    again, block by block. It is for as many threads as its `PieceUpdater`.
    """

    def __init__(self, updater: PieceUpdater, fused: FusedAdam | None) -> None:
        """
        Args:
            updater: the optimizer's rule on float32 weights.
            fused: a kernel with the same bits, for those groups that it `runs`.
        """
        self._updater = updater
        self._fused = fused
        self._of_thread = _Scratch()

    def update(
        self,
        group: Mapping[str, Any],
        weight: Tensor,
        remainder: Tensor,
        gradient: Tensor,
        scale: Tensor | None,
        state: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
        *,
        is_first: bool,
        formed: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Update one piece. All tensors are 1-D, without gaps, on one device, and of the alignment `PieceUpdater` asks for.

        Args:
            group: hyperparameters of the parameter's group.
            weight: bf16 model weight, changed in place.
            remainder: int16, changed in place.
            gradient: float32 or bf16; not modified.
            scale: 0-dim float32 that the gradient is multiplied with, or None.
            state: memory for each per-element state, by name, changed in place.
            scalars: the parameter's, as they were before this step. Not modified.
            is_first: the parameter's first step: what lies in ``state`` means nothing.
            formed: gives the elements of a piece the shape that `PieceUpdater` wants.

        Returns:
            The names of the states that the parameter has, and the scalars as they are after the step.
        """
        numel = weight.numel()
        is_fused = self._fused is not None and self._fused.runs(group)
        body = numel - numel % self._fused.vector_numel if self._fused is not None and is_fused else 0
        names: tuple[str, ...] = ()
        advanced: dict[str, Any] = {}
        if self._fused is not None and body:
            names = STATES
            if is_first:
                for name in STATES:
                    state[name].zero_()
            advanced = self._fused.update(
                group,
                weight[:body],
                remainder[:body],
                gradient[:body],
                scale,
                {name: state[name][:body] for name in STATES},
                scalars,
            )
        goes_at_once = weight.device.type != "cpu" or self._updater.mixes_elements
        block_numel = max(numel, 1) if goes_at_once else _BLOCK_NUMEL
        for start in range(body, numel, block_numel):
            span = slice(start, min(start + block_numel, numel))
            main, slope = self._scratch(span.stop - span.start, weight.device)
            join(weight[span], remainder[span], main)
            slope.copy_(gradient[span])
            if scale is not None:
                slope.mul_(scale)
            views = {name: formed(values[span]) for name, values in state.items()}
            given = None if is_first else views
            tensors, advanced = self._updater.update(group, formed(main), formed(slope), given, scalars)
            if is_first:
                for name in tensors:
                    views[name].copy_(tensors[name])
            split(main, weight[span], remainder[span])
            names = tuple(tensors)
            del tensors  # before the next block's are made
        return names, advanced

    def _scratch(self, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for a joined weight and its gradient. It is kept: an allocation per block would cost more than the rest."""
        kept = self._of_thread
        if kept.main is None or kept.gradient is None or kept.main.numel() < numel:
            size = max(numel, _BLOCK_NUMEL)
            kept.main = torch.empty(size, dtype=torch.float32, device=device)
            kept.gradient = torch.empty(size, dtype=torch.float32, device=device)
        return kept.main[:numel], kept.gradient[:numel]
