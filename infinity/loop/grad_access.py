"""What ``parameter.grad`` gives between backward and step, and what assigning it does.

Knows where gradients are; must not know when they come.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from infinity.errors import AccessError, OtherNumbersWarning
from infinity.gradients.live_gradients import LiveGradients
from infinity.gradients.paged_grad import PagedGradient
from infinity.loop.backward import Backwards
from infinity.paging.parameter_map import ParameterMap
from infinity.units.layout import Slot
from infinity.units.parameter import plain_grad, set_plain_grad
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper


class GradAccess:
    """The main gradients as ``parameter.grad``: see `LiveGradients`."""

    def __init__(
        self, parameter_map: ParameterMap, stepper: Stepper, backwards: Backwards, live: LiveGradients
    ) -> None:
        self._parameter_map = parameter_map
        self._stepper = stepper
        self._gradients = stepper.gradients
        self._backwards = backwards
        self._live = live

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient, or None without one.

        Raises:
            AccessError: it was used up by an update in backward, or is averaged in the step.
        """
        unit, slot = self._parameter_map.locate(parameter)
        if not slot.spec.is_trainable:
            return plain_grad(parameter)
        self._backwards.before_gradient_access(unit, slot)
        self._check_not_used_up(unit, slot)
        if slot not in self._gradients.slots_with_gradient(unit):
            return plain_grad(parameter)
        return self._live.of(unit, slot)

    def _check_not_used_up(self, unit: Unit, slot: Slot) -> None:
        if (unit.index, slot.index) in self._stepper.used_up:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="its unit was updated in backward, and the gradient was used up",
                cure='Set "infinity.update": "step" to see or change gradients between backward and step',
            )

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it.

        Raises:
            TypeError: it is no floating-point tensor.
            ValueError: wrong shape.
            AccessError: the one before was used up by an update in backward.
        """
        unit, slot = self._parameter_map.locate(parameter)
        if not slot.spec.is_trainable:
            set_plain_grad(parameter, gradient)
            return
        if gradient is not None:
            if not getattr(gradient, "is_floating_point", bool)():
                raise TypeError(f"gradient of '{slot.spec.fqn}' must be a floating-point tensor, got {gradient!r:.80}")
            if tuple(gradient.shape) != slot.spec.shape:
                raise ValueError(
                    f"gradient of '{slot.spec.fqn}' must have shape {slot.spec.shape}, got {tuple(gradient.shape)}"
                )
        self._backwards.before_gradient_access(unit, slot, assigns=gradient is not None)
        self._check_not_used_up(unit, slot)
        is_absent = slot not in self._gradients.slots_with_gradient(unit) and not self._gradients.is_in_parts
        if gradient is None and is_absent:
            return
        if gradient is not None:
            if self._live.is_same(unit, slot, gradient):
                return  # `parameter.grad *= 2`: it has been changed in place already
            if isinstance(gradient, PagedGradient):
                gradient = gradient.in_memory()
            if gradient.layout is not torch.strided:
                warnings.warn(OtherNumbersWarning.of_sparse_gradient(slot.spec.fqn), stacklevel=2)
                gradient = gradient.to_dense()
        self._live.replace(unit, slot, gradient)
        if gradient is None:
            self._backwards.note_drop()
