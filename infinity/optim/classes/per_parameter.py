"""An optimizer that updates one parameter after the other, each from its gradient alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class PerParameterOptimizer(Optimizer):
    """A subclass says how one parameter is updated."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        """
        Args:
            params: parameters or groups, as in `torch.optim`.
            defaults: hyperparameters, "lr", "betas" and "weight_decay" among them.

        Raises:
            ValueError: one of those, or "eps", is out of range.
        """
        if not float(defaults["lr"]) >= 0.0:
            raise ValueError(f"Invalid learning rate: {defaults['lr']}")
        for index, beta in enumerate(defaults["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not defaults.get("eps", 0.0) >= 0.0:
            raise ValueError(f"Invalid epsilon value: {defaults['eps']}")
        if not defaults["weight_decay"] >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {defaults['weight_decay']}")
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the model's loss with gradients; called once, before the update.

        Returns:
            What the closure returned, or None without one.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    if param.grad.is_sparse:
                        raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
                    self._update(param, param.grad, group)
        return loss

    @abstractmethod
    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Update ``param`` and its state, without recording a graph."""
