"""Answers for the parameters of one model while an engine holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from infinity.holding import ModelHolding
from infinity.layout import Slot
from infinity.pager import Pager
from infinity.parameter import plain_grad, set_plain_grad


class GradientHost(Protocol):
    """Whoever knows the gradients (``infinity.parameter_gradients``)."""

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None: ...

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None: ...


class Gatherer(Protocol):
    """Whoever gives full weights: the engine."""

    def gather(self, parameters: Sequence[nn.Parameter]) -> Any: ...

    def scatter(self, gathering: Any) -> None: ...


class Residence:
    """The `ParameterHost` of a model: passes each question on to the part that knows."""

    def __init__(self, holding: ModelHolding, pager: Pager) -> None:
        self._holding = holding
        self._pager = pager
        self.gradients: GradientHost | None = None
        self.engine: Gatherer | None = None

    def operate(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[nn.Parameter],
    ) -> Any:
        mine = [parameter for parameter in parameters if self._holding.holds(parameter)]
        return self._pager.operate(function, args, kwargs, mine, self._holding.locate)

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        self._pager.begin_outside_read()
        return self._pager.copy_of(*self._holding.locate(parameter))

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return plain_grad(parameter) if self.gradients is None else self.gradients.get(parameter)

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if self.gradients is None:
            set_plain_grad(parameter, gradient)
        else:
            self.gradients.set(parameter, gradient)

    def slot_of(self, parameter: nn.Parameter) -> Slot:
        return self._holding.locate(parameter)[1]
