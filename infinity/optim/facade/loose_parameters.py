"""Parameters that were added to the optimizer after `initialize`: ordinary ones, which no engine holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.optim.executor import OptimizerExecutor, copy_scalar
from infinity.optim.groups import Groups
from infinity.optim.wrapped_optimizer import WrappedOptimizer


class LooseParameters:
    """Updates them in memory, one by one, as torch does: gradient in ``p.grad``, state in `state`, in their own dtype.

    They are in no budget and stored on no drive.

    Args:
        wrapped_optimizer: its groups say which they are.
    """

    def __init__(self, wrapped_optimizer: WrappedOptimizer) -> None:
        self._wrapped_optimizer = wrapped_optimizer
        self._executor: OptimizerExecutor | None = None
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """What the optimizer keeps for each: live, as in torch."""

    def present(self) -> Sequence[Tensor]:
        """The loose parameters that are in a group now."""
        return self._wrapped_optimizer.members().loose

    def update(self, groups: Groups, coefficient: Tensor | None) -> None:
        """One step for each that has a gradient.

        Args:
            groups: of this step.
            coefficient: 0-dim fp32 tensor that every gradient is multiplied with on its way into the update, or None.
        """
        for param in groups.members.loose:
            values = groups.of(param)
            gradient = param.grad
            if gradient is None or values is None:
                continue
            if coefficient is not None:
                # A new tensor: as for the model's parameters, clipping does not show in `p.grad`.
                gradient = gradient.detach() * coefficient.to(gradient.device)
            # Made late: hardly any run adds parameters.
            self._executor = self._executor or self._wrapped_optimizer.executor()
            with torch.no_grad():
                # `detach`: the executor's leaf shares the memory, so the step writes to the parameter itself.
                # A copy of the hyperparameters: a class may count steps in its group, and each parameter's update must
                # begin with the same count.
                (state,) = self._executor.run(
                    copy_scalar(values), [param.detach()], [gradient], [self.state.get(param, {})]
                )
            torch.autograd.graph.increment_version(param)  # a module may know by it what it has kept
            if state:
                self.state[param].update(state)

    @property
    def have_gradients(self) -> bool:
        """Whether any of them has a gradient."""
        return any(param.grad is not None for param in self.present())

    def load_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """Replace the parameter's state; with an empty one it begins anew."""
        self.state.pop(param, None)
        if state:
            self.state[param] = state

    def zero_grad(self, set_to_none: bool) -> None:
        """As `Optimizer.zero_grad`."""
        for param in self.present():
            if set_to_none or param.grad is None:
                param.grad = None
                continue
            if param.grad.grad_fn is not None:
                param.grad.detach_()
            param.grad.requires_grad_(False).zero_()
