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
        self.scale = rules.initial if rules is not None else 1.0
        """What losses are multiplied with, and gradients divided by before they are used."""
        self._hysteresis_left = rules.hysteresis if rules is not None else 1
        self._num_finite = 0
        self._num_steps = 0

    @property
    def is_active(self) -> bool:
        """Whether losses are scaled at all."""
        return self._rules is not None

    # ------------------------------------------------------------------------------------------- DeepSpeed's names for it

    @property
    def cur_scale(self) -> float:
        """`scale`."""
        return self.scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the factor follows the steps."""
        return self._rules is not None and self._rules.is_dynamic

    dynamic_loss_scale = dynamic

    @property
    def cur_iter(self) -> int:
        """How many steps have been noted."""
        return self._num_steps

    @property
    def cur_hysteresis(self) -> int:
        """The overflow that will halve the factor, counted from the next one, which is 1."""
        return self._hysteresis_left

    @property
    def scale_window(self) -> int | None:
        """How many finite steps come before the one that doubles the factor; None: it is fixed."""
        return self._rules.window if self._rules is not None and self._rules.is_dynamic else None

    @property
    def min_scale(self) -> float | None:
        """The least factor; None: it is fixed."""
        return self._rules.minimum if self._rules is not None and self._rules.is_dynamic else None

    min_loss_scale = min_scale

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
        self._num_steps += 1
        if rules is None or not rules.is_dynamic:
            return
        if not is_finite:
            self._num_finite = 0
            # The first `hysteresis` - 1 overflows skip the step, and leave the factor.
            if self._has_zero and self._hysteresis_left > 1:
                self._hysteresis_left -= 1
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
            self._hysteresis_left = rules.hysteresis

    def state(self) -> dict[str, float]:
        """The state from which `load_state` continues."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "patience": self._hysteresis_left,  # the name that written checkpoints have
            "num_finite": self._num_finite,
            "num_steps": self._num_steps,
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave, if losses are, and were, scaled dynamically at all."""
        self._num_steps = int(state.get("num_steps", 0))  # which DeepSpeed's checkpoints lack
        if self._rules is not None and self._rules.is_dynamic and state["dynamic"]:
            self.scale = float(state["scale"])
            self._hysteresis_left, self._num_finite = int(state["patience"]), int(state["num_finite"])
