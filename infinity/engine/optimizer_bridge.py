"""What the optimizer that `initialize` returns talks to: the plain loop's way into the engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class OptimizerHost(Protocol):
    """The engine, as far as its optimizer needs it."""

    def optimizer_step(self) -> None: ...

    def was_step_skipped(self) -> bool: ...

    def optimizer_zero_grad(self, *, set_to_none: bool = True) -> None: ...

    def has_place(self, parameter: torch.Tensor) -> bool: ...

    def has_state(self, parameter: torch.Tensor) -> bool: ...

    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None: ...

    def gather_main_weight(self, parameter: torch.Tensor) -> torch.Tensor: ...

    def load_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None: ...


class OptimizerBridge:
    """Passes ``optimizer.step()``, ``zero_grad()`` and state access on to the engine."""

    def __init__(self, engine: OptimizerHost) -> None:
        self._engine = engine

    def step(self) -> None:
        """One optimizer step on the gradients that are there."""
        self._engine.optimizer_step()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self._engine.was_step_skipped()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget all gradients, or set those that are there to zero."""
        self._engine.optimizer_zero_grad(set_to_none=set_to_none)

    def has_place(self, param: torch.Tensor) -> bool:
        """Whether the parameter can have optimizer state."""
        return self._engine.has_place(param)

    def has_state(self, param: torch.Tensor) -> bool:
        """Whether the parameter has optimizer state."""
        return self._engine.has_state(param)

    def gather_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state."""
        return self._engine.gather_state(param)

    def load_state(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state."""
        self._engine.load_state(param, state)

    def gather_main_weight(self, param: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's main weight."""
        return self._engine.gather_main_weight(param)

    def load_main_weight(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a parameter's main weight."""
        self._engine.load_main_weight(param, values)
