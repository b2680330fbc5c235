"""The factor that lifts fp16 gradients out of what fp16 rounds to zero."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.config.resolved import LARGEST_LOSS_SCALE, LossScaling
from infinity.errors import StepError

_FACTOR = 2.0  # as in DeepSpeed; of a power of two, so that scaling only changes exponents


class LossScaler:
    """The present factor, and how it follows from the steps so far.

    The rule is that of DeepSpeed 0.19.8: the factor is doubled by the first finite step after ``window`` others (that of
    `torch.amp.GradScaler`, and of DeepSpeed before 0.19, doubles it with the last of them). Without ZeRO, it is halved at
    each overflow, whatever the hysteresis, and stays at its minimum without an error.
    """

    def __init__(self, rules: LossScaling | None, *, has_zero: bool = True) -> None:
        """
        Args:
            rules: those of the config; None: the factor is always 1.
            has_zero: whether the config asks for ZeRO.
        """
        self._rules = rules
        self._has_zero = has_zero
        self.is_active = rules is not None
        """Whether losses are scaled at all."""
        self.scale = rules.initial if rules is not None else 1.0
        """What losses are multiplied with, and gradients divided by before they are used."""
        self._num_finite = 0
        # The rest has DeepSpeed's names.
        self.dynamic = self.dynamic_loss_scale = rules is not None and rules.is_dynamic
        """Whether the factor follows the steps."""
        self.cur_iter = 0
        """How many steps have been noted."""
        self.cur_hysteresis = rules.hysteresis if rules is not None else 1
        """The overflow that will halve the factor, counted from the next one, which is 1."""
        self.scale_window = rules.window if rules is not None and rules.is_dynamic else None
        """How many finite steps come before the one that doubles the factor; None: it is fixed."""
        self.min_scale = self.min_loss_scale = rules.minimum if rules is not None and rules.is_dynamic else None
        """The least factor; None: it is fixed."""

    @property
    def cur_scale(self) -> float:
        """`scale`."""
        return self.scale

    loss_scale = cur_scale

    # ------------------------------------------------------------------------------------------------------------ the rule

    def scale_loss(self, loss: torch.Tensor, divisor: float) -> torch.Tensor:
        """What backward begins with: the micro-batch's share of the step's loss (one element), scaled (then fp32)."""
        if self._rules is None:
            return loss / divisor
        # In fp32: a scaled loss may be too large for fp16.
        return loss.float() / divisor * self.scale

    def update(self, *, is_finite: bool, step: int) -> None:
        """A step has ended, the ``step``-th; ``is_finite``: its gradients were.

        Raises:
            StepError: the factor would have to be smaller than the config allows.
        """
        rules = self._rules
        self.cur_iter += 1
        if rules is None or not rules.is_dynamic:
            return
        if not is_finite:
            self._num_finite = 0
            # The first `hysteresis` - 1 overflows skip the step, and leave the factor.
            if self._has_zero and self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
                return
            # As in DeepSpeed, the error is raised by an overflow at the minimum, not by the one that leads there.
            if self._has_zero and self.scale <= rules.minimum:
                raise StepError(
                    f"the gradients of step {step} are not finite, and the loss scale cannot become smaller: it is "
                    f"{self.scale}. The model diverges, or its gradients do not fit into fp16. Lower the learning rate, or "
                    'take "bf16" instead',
                    step=step,
                )
            self.scale = max(self.scale / _FACTOR, rules.minimum)
            return
        self._num_finite += 1
        # Example, window 2: of the finite steps 1 2 3 4 5 the factor is doubled by 3 and 5.
        is_due = self._num_finite > 1 and (self._num_finite - 1) % rules.window == 0
        if is_due:
            self.scale = min(self.scale * _FACTOR, LARGEST_LOSS_SCALE)
        if is_due or rules.refills_hysteresis:
            self.cur_hysteresis = rules.hysteresis

    def state(self) -> dict[str, float]:
        """The state from which `load_state` continues."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "patience": self.cur_hysteresis,  # the name that written checkpoints have
            "num_finite": self._num_finite,
            "num_steps": self.cur_iter,
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave, if losses are, and were, scaled dynamically at all."""
        self.cur_iter = int(state.get("num_steps", 0))  # which DeepSpeed's checkpoints lack
        if self._rules is not None and self._rules.is_dynamic and state["dynamic"]:
            self.scale = float(state["scale"])
            self.cur_hysteresis, self._num_finite = int(state["patience"]), int(state["num_finite"])
