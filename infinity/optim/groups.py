"""The optimizer's parameter groups as they are at one moment: when a step begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from infinity.errors import ParameterGroupError
from infinity.optim.values import same_values
from infinity.optim.worker import hyperparameters


class Groups:
    """Hyperparameters by group, and which parameter is in which group. What happens to the optimizer later changes nothing.

    Args:
        param_groups: the optimizer's.
        fqns: names of the model's parameters, for messages.

    Raises:
        ParameterGroupError: a parameter is in two groups, or twice in one: it would be updated twice.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], fqns: Mapping[Any, str]) -> None:
        self.values = [hyperparameters(group) for group in param_groups]
        self.params: dict[int, Tensor] = {}
        """All parameters, by ``id``, in the order of the groups."""
        self._index_of: dict[int, int] = {}
        for index, group in enumerate(param_groups):
            for param in group["params"]:
                key = id(param)
                if key in self._index_of:
                    name = fqns.get(param, f"a tensor of shape {tuple(param.shape)}")
                    raise ParameterGroupError(name, group_indices=(self._index_of[key], index))
                self._index_of[key] = index
                self.params[key] = param

    def index_of(self, param: object) -> int | None:
        """The index of the parameter's group; None if it is in none."""
        return self._index_of.get(id(param))

    def of(self, param: object) -> dict[str, Any] | None:
        """The hyperparameters for a parameter; None if it is in no group."""
        index = self._index_of.get(id(param))
        return None if index is None else self.values[index]

    def changed_since(self, earlier: Groups) -> list[str]:
        """Names of what differs: hyperparameters, or "params" where a parameter is in another group or in none."""
        before, now = earlier.values, self.values
        keys = {key for group in [*before, *now] for key in group}
        changed = sorted(
            key
            for key in keys
            if not same_values([group.get(key) for group in before], [group.get(key) for group in now])
        )
        return [*changed, "params"] if earlier._index_of != self._index_of else changed
