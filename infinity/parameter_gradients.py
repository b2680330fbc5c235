"""What ``parameter.grad`` gives between backward and step, and what assigning it does.

Knows where gradients are; must not know when they come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from infinity.errors import GradientNotResidentError
from infinity.holding import ModelHolding
from infinity.pager import Pager, in_backward
from infinity.parameter import plain_grad, set_plain_grad
from infinity.stepper import Stepper


class ParameterGradients:
    """The main gradients as ``parameter.grad``: live, of the parameter's shape, on the host.

    They are fp32, or bf16 if the config asks for gradients that are rounded to it.
    """

    def __init__(self, holding: ModelHolding, pager: Pager, stepper: Stepper, collect: Callable[[], None]) -> None:
        """``collect`` takes note of what a ``loss.backward()`` of the user left."""
        self._holding = holding
        self._pager = pager
        self._stepper = stepper
        self._collect = collect

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient, or None without one.

        Raises:
            GradientNotResidentError: it is spilled, or was used up by an update in backward.
        """
        unit, slot = self._holding.locate(parameter)
        if not slot.spec.is_trainable or in_backward():
            return plain_grad(parameter)
        self._collect()
        if self._stepper.is_used_up(unit, slot):
            raise GradientNotResidentError(
                slot.spec.fqn,
                reason="its unit was updated in backward, and the gradient was used up",
                cure='Set "infinity.update": "step" to see gradients between backward and step',
            )
        gradients = self._stepper.gradients
        if slot not in gradients.slots_with_gradient(unit):
            return plain_grad(parameter)
        if not gradients.widen(unit):
            raise GradientNotResidentError(
                slot.spec.fqn,
                reason="it is spilled to NVMe",
                cure="Set gradient_clipping in the config instead of clipping by hand, call optimizer.zero_grad() "
                "instead of model.zero_grad(), or raise infinity.host_memory_budget",
            )
        return gradients.gradient_of(unit, slot)

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it.

        Raises:
            GradientNotResidentError: the unit's gradients are spilled.
            ValueError: wrong shape.
        """
        unit, slot = self._holding.locate(parameter)
        if not slot.spec.is_trainable or in_backward():
            set_plain_grad(parameter, gradient)
            return
        self._collect()
        if gradient is not None:
            if tuple(gradient.shape) != slot.spec.shape:
                raise ValueError(
                    f"gradient of '{slot.spec.fqn}' must have shape {slot.spec.shape}, got {tuple(gradient.shape)}"
                )
            if self._stepper.gradients.is_spilled(unit):
                raise GradientNotResidentError(
                    slot.spec.fqn,
                    reason="gradients of its unit are spilled to NVMe and cannot be set",
                    cure="Raise infinity.host_memory_budget",
                )
        self._pager.await_update(unit)
        set_plain_grad(parameter, None)
        self._stepper.gradients.set_gradient(unit, slot, gradient)
