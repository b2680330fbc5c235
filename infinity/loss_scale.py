"""The factor that lifts fp16 gradients out of what fp16 rounds to zero.

Pure arithmetic; must not know where gradients lie.
"""

from __future__ import annotations

import torch

from infinity.config import LARGEST_LOSS_SCALE, LossScaling
from infinity.errors import LossScaleError

_FACTOR = 2.0


class LossScaler:
    """The present factor, and how it follows from the steps so far.

    The rule is that of DeepSpeed's dynamic loss scaler (and, with a hysteresis of 1, of `torch.amp.GradScaler` with a
    growth factor of 2 and a backoff factor of 0.5).
    """

    def __init__(self, rules: LossScaling | None) -> None:
        """``rules`` are those of the config; None: the factor is always 1."""
        self._rules = rules
        self.scale = rules.initial if rules is not None else 1.0
        """What losses are multiplied with, and gradients divided by before they are used."""
        self._patience = rules.hysteresis if rules is not None else 1
        self._num_finite = 0

    @property
    def is_active(self) -> bool:
        """Whether losses are scaled at all."""
        return self._rules is not None

    def share_of(self, loss: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
        """What backward begins with: the micro-batch's share of the step's loss (one element), scaled (then fp32)."""
        if self._rules is None:
            return loss / num_micro_batches
        return loss.float() / num_micro_batches * self.scale

    def note(self, *, is_finite: bool, step: int) -> None:
        """A step has ended, the ``step``-th; ``is_finite``: its gradients were.

        Raises:
            LossScaleError: the factor would have to be smaller than the config allows.
        """
        rules = self._rules
        if rules is None or not rules.is_dynamic:
            return
        if not is_finite:
            self._num_finite = 0
            if self._patience > 1:
                self._patience -= 1
                return
            if self.scale <= rules.minimum:
                raise LossScaleError(self.scale, step=step)
            self.scale = max(self.scale / _FACTOR, rules.minimum)
            return
        self._num_finite += 1
        is_due = self._num_finite % rules.window == 0
        if is_due:
            self.scale = min(self.scale * _FACTOR, LARGEST_LOSS_SCALE)
        if is_due or rules.refills_hysteresis:
            self._patience = rules.hysteresis
