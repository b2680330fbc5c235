"""What the optimizer that `initialize` returns talks to: the plain loop's way into the engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class OptimizerHost(Protocol):
    """The engine, as far as its optimizer needs it."""

    def optimizer_step(self) -> None: ...

    def was_step_applied(self) -> bool: ...

    def optimizer_zero_grad(self) -> None: ...

    def has_state(self, parameter: torch.Tensor) -> bool: ...

    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None: ...


class EngineBackend:
    """Passes ``optimizer.step()``, ``zero_grad()`` and state access on to the engine."""

    def __init__(self, engine: OptimizerHost) -> None:
        self._engine = engine

    def step(self) -> None:
        """One optimizer step on the gradients that are there."""
        self._engine.optimizer_step()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return not self._engine.was_step_applied()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget all gradients. They are always dropped, never set to zero."""
        self._engine.optimizer_zero_grad()

    def has_state(self, param: torch.Tensor) -> bool:
        """Whether the parameter has optimizer state."""
        return self._engine.has_state(param)

    def gather_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state."""
        return self._engine.gather_state(param)

    def load_state(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state."""
        self._engine.load_state(param, state)
