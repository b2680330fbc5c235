"""The optimizer that Lightning gets: it calls the engine's backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from infinity.engine.engine import Engine
from infinity.errors import ModelError


class EngineOptimizer(Optimizer):
    """The optimizer that Lightning gets: its step is the engine's.

    Attributes:
        engine: the engine of this optimizer.
        is_stepping: whether `step` is running. A backward in its closure is the last one of the step.
    """

    def __init__(self, engine: Engine, *, averages_always: bool = False) -> None:
        """``engine`` has an optimizer. ``averages_always``: average gradients over processes in each backward."""
        # Not Optimizer.__init__: groups, states, defaults and hooks are the engine's optimizer's, see `__getattr__`.
        self.engine = engine
        self.is_stepping = False
        self._averages_always = averages_always
        self._has_backward = False
        self._opt_called = True  # torch's schedulers warn if their optimizer has made no step

    def __getattr__(self, name: str) -> Any:
        # A copy lacks "engine" at first, and this would call itself. Libraries unwrap while there is an "optimizer".
        if name in ("engine", "optimizer"):
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the engine's optimizer."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the values of groups, and add new groups. ``BaseFinetuning`` assigns groups when it resumes.

        Raises:
            ModelError: a group has other parameters than before.
        """
        there = self.param_groups
        for own, group in zip(there, groups, strict=False):
            if list(map(id, own["params"])) != list(map(id, group["params"])):
                problem = "optimizer.param_groups is set to groups with other parameters than the optimizer's"
                raise ModelError(problem, cure="Leave its groups as they are, and add others with add_param_group")
            own.update(group)
        for group in groups[len(there) :]:
            self.add_param_group(group)

    def __repr__(self) -> str:
        return repr(self.engine.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.engine.optimizer.zero_grad(set_to_none)
        self._has_backward = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the engine's optimizer: frozen parameters get room for states (``BaseFinetuning``)."""
        self.engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As the engine's optimizer."""
        found: dict[str, Any] = self.engine.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the engine's optimizer."""
        self.engine.optimizer.load_state_dict(state_dict)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of a micro-batch. Lightning has divided the loss by the accumulation steps."""
        self.engine.set_gradient_accumulation_boundary(self.is_stepping or self._averages_always)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._has_backward = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which calls the last backward, and then the engine's step. Returns the closure's result."""
        self.is_stepping = True
        try:
            with torch.enable_grad():
                found = None if closure is None else closure()
        finally:
            self.is_stepping = False
        if self._has_backward:
            self._has_backward = False
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
            self.engine.set_gradient_accumulation_boundary(None)
        else:  # the module has called `loss.backward()` itself, or no backward ran
            self.engine.optimizer.step()
        return found

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers check it, and would wrap `step` again
