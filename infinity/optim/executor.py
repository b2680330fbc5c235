"""Running the user's own optimizer class on tensors handed in, away from the optimizer the user sees."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from infinity.errors import OptimizerNotPageableError

#: Entries of a parameter group that say which parameters it holds; all others are hyperparameters.
MEMBERSHIP_KEYS = frozenset({"params", "param_names"})


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's hyperparameters as they are now.

    Tensors among them (a tensor `lr`, which torch's schedulers fill in place) are copied, so that a later change does
    not reach an update that was fixed before it.
    """
    return {key: copy_scalar(value) for key, value in group.items() if key not in MEMBERSHIP_KEYS}


def copy_scalar(value: Any) -> Any:
    """An independent copy of a scalar state entry: steps advance such tensors in place."""
    # A parameter in it is a weight, and stays the same tensor: a copy could be as large as the model.
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) and value.numel() > 1 else value.detach().clone()
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if type(value) is tuple:
        items = tuple(copy_scalar(item) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if type(value) is list:
        return [copy_scalar(item) for item in value]
    return {key: copy_scalar(item) for key, item in value.items()} if isinstance(value, dict) else value


def one_element(device: torch.device | str = "cpu", num_dims: int = 1) -> Tensor:
    """A zero that stands in for a tensor that would be large. Default dtype and device are the user's, not ours."""
    return torch.zeros((1,) * num_dims, dtype=torch.float32, device=device)


class OptimizerExecutor:
    """An instance of the optimizer's class with its attributes, whose parameters and state are given per call.

    The given optimizer is never modified. One thread at a time.

    Step hooks (the instance's and torch's global ones) and the profiler range of `Optimizer.step` belong to a step of
    the whole model; they are left out here, where a step is one slice. So are patches on the instance: learning rate
    schedulers wrap `optimizer.step` to count calls.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        """``device``: where trial steps run."""
        self.device = device
        cls = type(optimizer)
        # Without __init__, which would need parameters and allocate states.
        clone = cls.__new__(cls)
        vars(clone).update(vars(optimizer))
        # A scheduler's or script's wrapper of `step` is an attribute of the instance: the class's own runs here.
        vars(clone).pop("step", None)
        # All these dictionaries would otherwise be shared with the user's optimizer.
        vars(clone).update({name: OrderedDict() for name in vars(clone) if name.endswith("_hooks")})
        clone.defaults = dict(optimizer.defaults)
        clone.state = defaultdict(dict)
        clone.param_groups = []
        self.optimizer = clone
        """The clone, without parameters and state between calls."""
        # torch replaces a class's `step` by a wrapper marked `hooked`, which runs hooks and opens a profiler range.
        step: Any = cls.step
        self._step: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    @property
    def name(self) -> str:
        """The class's name, as messages call it."""
        return type(self.optimizer).__name__

    def unpageable(self, reason: str, cure: str | None = None) -> OptimizerNotPageableError:
        """The error for a class that cannot be run slice by slice."""
        return OptimizerNotPageableError(self.name, reason, cure=cure)

    def run(
        self,
        group: dict[str, Any],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        states: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """One optimizer step over `weights` as if they were all parameters of one group.

        Args:
            group: hyperparameters. The step sees this very dict with an entry "params" added, which is taken out again.
            weights: changed in place; any shape, dtype and device.
            grads: one for each weight; some optimizers overwrite it (SGD with nesterov and foreach does).
            states: one for each weight; an empty one makes the optimizer start it. Tensors in it change in place.

        Returns:
            The states after the step. They share the given tensors, except those that the optimizer replaced.

        Raises:
            OptimizerNotPageableError: the optimizer keeps something in its state that is no parameter's.
        """
        return self.run_groups([group], [weights], [grads], [states])[0]

    def run_groups(
        self,
        groups: Sequence[dict[str, Any]],
        weights: Sequence[Sequence[Tensor]],
        grads: Sequence[Sequence[Tensor | None]],
        states: Sequence[Sequence[dict[str, Any]]],
    ) -> list[list[dict[str, Any]]]:
        """`run` for several groups in one step: all arguments and the result are lists by group."""
        optimizer = self.optimizer
        leaves: list[list[Tensor]] = []
        try:
            for group, *members in zip(groups, weights, grads, states, strict=True):
                leaves.append([self._leaf(*member) for member in zip(*members, strict=True)])
                group["params"] = leaves[-1]
                optimizer.param_groups.append(group)
            with torch.no_grad():
                self._step(optimizer)
                for updated, weight in zip(chain(*leaves), chain(*weights), strict=True):
                    if updated.data_ptr() != weight.data_ptr():
                        weight.copy_(updated)  # the optimizer assigned `p.data` instead of writing into it
            found = [[optimizer.state.pop(leaf, None) or {} for leaf in members] for members in leaves]
            # What is left belongs to no parameter. A slice's step would begin it anew each time.
            refuse_common(optimizer, list(optimizer.state))
            return found
        finally:
            optimizer.state.clear()
            optimizer.param_groups.clear()
            for group in groups:
                group.pop("params", None)

    def training(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The group as the class's ``train()`` leaves it, if it has one: schedule-free ones refuse to step before it."""
        own = {**group, "params": []}
        self.optimizer.param_groups.append(own)
        try:
            # `train` is nn.Module's name: other classes have another meaning for it, or arguments.
            with contextlib.suppress(AttributeError, TypeError):
                self.optimizer.train()  # type: ignore[attr-defined]
        finally:
            self.optimizer.param_groups.clear()
        del own["params"]
        return own

    def _leaf(self, weight: Tensor, grad: Tensor | None, state: dict[str, Any]) -> Tensor:
        # A Parameter of its own: `.grad` must not stay on the caller's tensor.
        leaf = torch.nn.Parameter(weight)
        leaf.grad = grad
        if state:
            self.optimizer.state[leaf] = state
        return leaf

    def load(self, group: Mapping[str, Any], state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """A saved state as the class's own `load_state_dict` takes it: old layouts, devices and dtypes of step counts.

        Args:
            group: hyperparameters the state will be used with.
            state: of one parameter. Its large tensors would be copied: put one-element ones in their place.
            like: has the parameter's device and dtype.
        """
        optimizer = self.optimizer
        stand_in = torch.nn.Parameter(like, requires_grad=False)
        optimizer.param_groups = [{**group, "params": [stand_in]}]
        try:
            optimizer.load_state_dict({"state": {0: dict(state)}, "param_groups": [{**group, "params": [0]}]})
            return dict(optimizer.state[stand_in])
        finally:
            optimizer.state.clear()
            optimizer.param_groups.clear()


def refuse_common(optimizer: Optimizer, keys: Iterable[Any]) -> None:
    """Refuse what is in ``optimizer.state`` under these keys, which are no parameter's.

    Raises:
        OptimizerNotPageableError: which key.
    """
    found = [key for key in keys if optimizer.state[key] != {}]  # who looks for what is not there gets an empty one
    if found:
        what = "another tensor" if isinstance(found[0], Tensor) else repr(found[0])
        raise OptimizerNotPageableError(
            type(optimizer).__name__,
            f"it keeps one state for all parameters together, self.state[{what}], but updates run on slices of "
            "single parameters",
            cure="Keep it for each parameter: self.state[parameter]",
        )


def same_values(left: object, right: object) -> bool:
    """Whether two nested values are equal: tensors and arrays by shape, dtype and elements; NaN is equal to NaN."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        is_alike = left.shape == right.shape and left.dtype == right.dtype
        return is_alike and (torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))
    if isinstance(left, numpy.ndarray) and isinstance(right, numpy.ndarray):
        return left.dtype == right.dtype and numpy.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    if isinstance(left, Tensor | numpy.ndarray) or isinstance(right, Tensor | numpy.ndarray):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_values(one, other) for one, other in zip(left, right, strict=True))
    return bool(left == right or (left != left and right != right))
