"""What the parameters were before `initialize`, until it has got through: a failure gives them back.

Knows parameters and how the engine stores them; must not know why it failed.

[Note: what comes back] The engine stores a trainable parameter as fp32 and a frozen one in its compute dtype, or packed. What is
stored is the copy from which the parameter comes back, so nothing is copied in case of a failure. Nearly always it holds every
bit. Otherwise (fp64 weights, a frozen fp32 one under bf16) the parameter comes back rounded, which is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from infinity.device.drive_tensors import drives_of
from infinity.units.layout import Slot
from infinity.units.parameter import PagedParameter, let_go, plain_grad, set_plain_grad
from infinity.units.unit import Unit

logger = logging.getLogger(__name__)


class Originals:
    """Begins before the first unit is taken over, and ends when `initialize` returns."""

    def __init__(self, units: Sequence[Unit], stored: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """
        Args:
            units: all that are to be taken over.
            stored: what is stored of a parameter that is held: its main weight, or its weight if it is frozen.
        """
        self._units = units
        self._stored = stored
        self._facts = {
            id(parameter): (parameter.dtype, parameter.device, parameter.stride(), parameter.grad, drives_of(parameter))
            for unit in units
            for parameter in unit.parameters
        }

    def gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that had a gradient, and what it was."""
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        found = ((parameter, self._facts[id(parameter)][3]) for parameter in parameters)
        return [(parameter, gradient) for parameter, gradient in found if gradient is not None]

    def give_back(self) -> None:
        """Whatever is held already becomes ordinary again: values, dtype, device, strides, gradient.

        What cannot be read any more stays paged out; the error is raised when all else is back.
        """
        failure: BaseException | None = None
        rounded: list[str] = []
        for unit in self._units:
            values: dict[nn.Parameter, torch.Tensor] = {}  # all first: to read one opens the unit
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if isinstance(parameter, PagedParameter):
                    try:
                        values[parameter] = self._value_of(parameter)
                    except Exception as error:
                        failure = failure or error
                    else:
                        rounded += [slot.spec.fqn] if self._is_rounded(slot, parameter) else []
            let_go(values)
            for parameter, value in values.items():
                parameter.data = value
            for parameter in unit.parameters:
                if plain_grad(parameter) is None:
                    set_plain_grad(parameter, self._facts[id(parameter)][3])
        if rounded:
            logger.warning(
                "infinity.initialize failed, and %d parameters ('%s', ...) came back rounded to the dtype in which the engine "
                "stores them. Load the model's weights again before you use it",
                len(rounded),
                rounded[0],
            )
        if failure is not None:
            raise failure

    def _is_rounded(self, slot: Slot, parameter: nn.Parameter) -> bool:
        """Whether what is stored of the parameter may have lost bits."""
        came, stored = self._facts[id(parameter)][0], torch.float32 if slot.spec.is_trainable else slot.spec.dtype
        is_narrower = came != stored and torch.promote_types(came, stored) != stored
        return parameter.numel() > 0 and (slot.spec.packed is not None or is_narrower)

    def _value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        dtype, device, stride, _, drives = self._facts[id(parameter)]
        value = self._stored(parameter)
        for dim, step in enumerate(stride):
            if step == 0:  # as many looked at one element
                value = value[(slice(None),) * dim + (slice(0, 1),)]
        if drives is not None:
            place = drives.empty(value.shape, dtype, stride=stride)
        else:
            place = torch.empty_strided(value.shape, stride, dtype=dtype, device=device)
        return place.copy_(value).expand(parameter.shape)
