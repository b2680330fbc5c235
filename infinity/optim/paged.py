"""The optimizer that `initialize` returns: a torch optimizer whose state lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from infinity.optim.lazy_state import LazyEntry, LazyState
from infinity.optim.piece import PieceUpdater
from infinity.optim.state_loader import StateLoader
from infinity.optim.template import Template


class StepBackend(Protocol):
    """Who holds weights, gradients and state, and runs the updates: the engine."""

    def step(self) -> None:
        """Update every parameter that has a gradient, with the hyperparameters as they are now."""
        ...

    @property
    def overflow(self) -> bool:
        """Whether the last step changed nothing, because its gradients were not finite."""
        ...

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients, as `Optimizer.zero_grad` does."""
        ...

    def has_state(self, param: Tensor) -> bool:
        """Whether an update asked for so far, or a load, gives the parameter state."""
        ...

    def gather_state(self, param: Tensor) -> dict[str, Any]:
        """Copies of the parameter's state after all updates asked for: element-wise ones float32 of its shape, and
        scalars. Empty when it has none."""
        ...

    def load_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """Replace the parameter's state: every name of `PieceUpdater.state_names` as float32 of its shape, and
        scalars; tensors belong to the caller and are to be copied. Empty: the parameter starts anew."""
        ...


class PagedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` in front of the engine.

    It knows groups and the layout of state dicts; it must not know pages or tiers. `param_groups` is the template's
    list, so learning rate schedulers of any kind work on either. `state_dict()` costs nothing: its entries gather a
    parameter's state when they are read or pickled, and then give what it is at that time (as torch's state dict
    references live tensors, too).

    Args:
        template: class, hyperparameters and groups.
        updater: knows which state there is.
        backend: does the work.
    """

    def __init__(self, template: Template, updater: PieceUpdater, backend: StepBackend) -> None:
        # Not Optimizer.__init__: it would make groups of its own.
        self._template = template
        self._updater = updater
        self._backend = backend
        source = template.optimizer
        state = LazyState(template.params, lambda param: param in template and backend.has_state(param), self._entry)
        super().__setstate__(
            {"defaults": source.defaults, "state": state, "param_groups": source.param_groups}
            # The very dictionaries: hooks registered before `initialize` run, and their handles still remove them.
            | {name: hooks for name, hooks in vars(source).items() if name.endswith("_hooks")}
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters, see `StepBackend.step`.

        Args:
            closure: recomputes the loss with gradients; called once, before the update.

        Returns:
            What the closure returned, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._backend.step()
        # A scheduler made on the user's own instance looks there for whether a step came before its own.
        self._template.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    @property
    def overflow(self) -> bool:
        """Whether the last step changed nothing, because its gradients were not finite."""
        return self._backend.overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        self._backend.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: storage for all states was laid out in `initialize`."""
        raise NotImplementedError(
            "cannot add a parameter group: storage for all states was laid out in infinity.initialize. Put the "
            "parameters into a group before it (with requires_grad), or make a new engine"
        )

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's layout; the state's entries are lazy, see the class."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what the `state_dict()` of this optimizer, or of the plain torch one it stands for, returned.

        Checks come first, so a refused dict changes nothing. State is then written parameter by parameter; a parameter
        without an entry starts anew. Hyperparameters are those of the dict, as in torch.

        Raises:
            ValueError: groups of other number or sizes, a state of another shape, or state that this optimizer does
                not keep under the hyperparameters it was made with.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        StateLoader(self._template, self._updater, state_dict).load_into(self._backend)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _entry(self, param: Tensor) -> LazyEntry:
        return LazyEntry(lambda: self._backend.gather_state(param), self._template.fqn(param))

    def __repr__(self) -> str:
        return f"Paged{self._template.optimizer!r}"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer whose state lies outside memory cannot be copied or pickled. "
            "Use optimizer.state_dict() with torch.save or copy.deepcopy"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()


__all__ = ["PagedOptimizer", "StepBackend"]
