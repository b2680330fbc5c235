"""Updating a parameter slice by slice with the user's own optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from infinity.errors import ConfigError, OptimizerNotPageableError
from infinity.numerics.state_format import StateFormat
from infinity.optim.classes import Lion
from infinity.optim.executor import MEMBERSHIP_KEYS, OptimizerExecutor, copy_scalar, hyperparameters, same_values
from infinity.optim.probe import StateSchema, advanced, learn_schema, probe, probe_groups
from infinity.optim.registry import is_verified, mixes_elements
from infinity.optim.wrapped_optimizer import WrappedOptimizer


class SliceUpdater:
    """Runs the wrapped optimizer's class on one slice of one parameter at a time, or on one parameter (`mixes_elements`).

    `update` may be called from any thread, and from several at a time if `is_for_threads`. Nothing global is touched:
    no random generator, no thread count, no hook.

    Args:
        wrapped_optimizer: gives class, attributes and hyperparameters. A class that is not one of the known ones is probed
            here.

    Raises:
        OptimizerNotPageableError: a parameter's update depends on other parameters, or its state has another form than one
            value per element and single values.
    """

    def __init__(self, wrapped_optimizer: WrappedOptimizer) -> None:
        self._wrapped_optimizer = wrapped_optimizer
        self._executor = wrapped_optimizer.executor()
        self._of_thread = threading.local()
        self._schemas: dict[tuple[Any, ...], StateSchema] = {}
        self._elementwise: frozenset[str] = frozenset()
        self._is_verified = is_verified(type(wrapped_optimizer.optimizer))
        self.mixes_elements = mixes_elements(type(wrapped_optimizer.optimizer))
        """Whether a parameter has to be updated as a whole: its elements' updates depend on each other."""
        self._is_laid_out = False
        """From the end of construction on others rely on `mixes_elements`."""
        if not self._is_verified:  # other classes may read what slices do not have
            refuse_attributes_of_parameters(wrapped_optimizer.optimizer, wrapped_optimizer.params())
        self._initial_attributes = attributes_of(wrapped_optimizer.optimizer)
        self._has_moved = False
        tried: list[dict[str, Any]] = []
        # A class may look at `p.grad` of parameters that it holds on to: trials must not use or change it.
        with _without_gradients(wrapped_optimizer.params()):
            for group in wrapped_optimizer.param_groups:
                values = hyperparameters(group)
                if not any(_behave_equally(other, values) for other in tried):
                    # A rule that is not known may look at more than the kind.
                    self._schemas.pop(_trial_key(values), None)
                    self.schema_under(values)
                    tried.append(values)
            if len(wrapped_optimizer.param_groups) > 1 and not self._is_verified:
                schemas = [self.schema_under(hyperparameters(group)) for group in wrapped_optimizer.param_groups]
                executor = wrapped_optimizer.executor()
                # Not copied: groups that share a tensor are tried with one that they share (a tensor lr, say).
                own = [
                    {key: group[key] for key in group.keys() - MEMBERSHIP_KEYS}
                    for group in wrapped_optimizer.param_groups
                ]
                probe_groups(executor, [*map(executor.training, own)], schemas)
        # Updates run in a clone of this instance. A wrapper whose inner optimizer holds the groups would update
        # nothing.
        if tried and not self._is_verified and not self._has_moved:
            raise self._executor.unpageable(
                "its step() changes no weight in its own groups: it seems to call another optimizer",
                cure="Pass that one; what is done around its steps can be done in the training loop, to weights inside "
                "`with infinity.GatheredParameters(...)`",
            )
        self._is_laid_out = True

    def schema_under(self, values: Mapping[str, Any]) -> StateSchema:
        """What these hyperparameters make the optimizer keep of a parameter.

        It is found out by a trial for each combination of switches, and of values that are zero or not.

        Raises:
            OptimizerNotPageableError: a trial step fails, or, in a class that is not a known one, mixes elements.
        """
        found = self._schemas.get(_trial_key(values))
        if found is None:
            # An executor of its own: updates may be running in another thread.
            executor = self._wrapped_optimizer.executor()
            tried = values if self._is_verified else executor.training(values)
            found = learn_schema(executor, tried)
            if not self._is_verified:
                self._has_moved |= self._probe(executor, tried, found)
                # What it counts in the group is no longer zero after a step: the trial has been there.
                self._schemas[_trial_key(advanced(executor, tried, found))] = found
            self._schemas[_trial_key(values)] = found
            self._elementwise |= frozenset(found.elementwise)
        return found

    def _probe(self, executor: OptimizerExecutor, values: Mapping[str, Any], schema: StateSchema) -> bool:
        """Returns whether any weight was changed."""
        if not self.mixes_elements:
            try:
                return probe(executor, values, schema, is_whole=False)
            except OptimizerNotPageableError:
                if self._is_laid_out:  # chunks were cut for slices: too late to update whole parameters
                    raise
        # It fails on slices: perhaps it updates each parameter as a whole, as LAMB does.
        has_moved = probe(executor, values, schema, is_whole=True)
        self.mixes_elements = True
        return has_moved

    @property
    def is_for_threads(self) -> bool:
        """Whether slices may be updated beside each other: of a class that nobody knows, instances may share memory.

        Whole parameters go one at a time, each on as many threads as in plain torch: sums depend on their number.
        """
        return self._is_verified and not self.mixes_elements

    def _current_executor(self) -> OptimizerExecutor:
        """The calling thread's executor: a step runs in its groups and states. One for all, if slices may not run in
        parallel."""
        if not self._is_verified:
            return self._executor
        executor: OptimizerExecutor | None = getattr(self._of_thread, "executor", None)
        if executor is None:
            executor = self._of_thread.executor = self._wrapped_optimizer.executor()
        return executor

    def check_attributes(self) -> None:
        """Raise OptimizerNotPageableError if an attribute of the user's optimizer is another than in `initialize`."""
        if self._is_verified:
            return
        now = attributes_of(self._wrapped_optimizer.optimizer)
        for name in sorted(now.keys() | self._initial_attributes.keys()):
            if not same_values(now.get(name), self._initial_attributes.get(name)):
                raise self._executor.unpageable(
                    f"its attribute '{name}' has changed since infinity.initialize, and updates go by what it was",
                    cure="Make it an entry of the parameter groups: those may change",
                )

    def advanced(self, values: Mapping[str, Any], *, has_gradient: bool) -> dict[str, Any]:
        """What a step changes in a group: entries with their values after it.

        Args:
            values: the group's hyperparameters before.
            has_gradient: whether any of its parameters has one.
        """
        if self._is_verified:
            return {}
        # An executor of its own: updates may be running in another thread.
        executor = self._wrapped_optimizer.executor()
        after = advanced(executor, values, self.schema_under(values), has_gradient=has_gradient)
        return {
            name: value for name, value in after.items() if name not in values or not same_values(value, values[name])
        }

    def state_names(self, group_index: int) -> tuple[str, ...]:
        """Names of the float32 state tensors of a parameter's shape, under the hyperparameters that this group has now."""
        return self.schema_under(hyperparameters(self._wrapped_optimizer.param_groups[group_index])).elementwise

    def update(
        self,
        group: Mapping[str, Any],
        weight: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor] | None,
        scalars: Mapping[str, Any],
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Update one slice. The result has the bits that a step on the whole parameter gives these elements.

        Args:
            group: hyperparameters of the parameter's group, see `hyperparameters`. Not modified.
            weight: float32, 1-D, of any device; starts at a multiple of `probe.SLICE_ALIGNMENT` elements from the parameter's
                start and, unless it is the last slice, is such a multiple long. With `mixes_elements` it is the whole
                parameter, in its own shape. Changed in place.
            grad: like `weight`. It may be overwritten.
            state: a tensor like `weight` for each of `state_names`, changed in place. None in the parameter's first
                step: then the optimizer makes them.
            scalars: the parameter's, as they were before this step, the same for each slice. Not modified.

        Returns:
            The state (the given tensors, or new ones that the caller owns), and the scalars as they are after the step.

        Raises:
            OptimizerNotPageableError: the optimizer made state that it had not when it was taken over.
        """
        before: dict[str, Any] = {name: copy_scalar(value) for name, value in scalars.items()}
        if state is not None:
            before.update(state)
        # A class that is not known may count in its group: each slice must begin with the same count.
        own = dict(group) if self._is_verified else copy_scalar(dict(group))
        (after,) = self._current_executor().run(own, [weight], [grad], [before])
        tensors: dict[str, Tensor] = {}
        advanced: dict[str, Any] = {}
        for name, value in after.items():
            if name not in self._elementwise:
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise self._grown(name)
                advanced[name] = value
            elif state is None:
                tensors[name] = value
            else:
                view = state.get(name)
                if view is None:
                    raise self._grown(name)
                if value is not view:  # the optimizer replaced the tensor: the record has to get its values
                    view.copy_(value)
                tensors[name] = view
        return tensors, advanced

    def _grown(self, name: str) -> OptimizerNotPageableError:
        return self._executor.unpageable(
            f"its state '{name}' appeared after its place in storage was laid out",
            cure="Set hyperparameters that decide which state exists (momentum, amsgrad, centered) before "
            "infinity.initialize and don't change them between zero and nonzero",
        )


@contextlib.contextmanager
def _without_gradients(params: Iterable[Tensor]) -> Iterator[None]:
    kept = [(param, param.grad) for param in params]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad


_RATES = frozenset({"lr", "initial_lr"})
"""Hyperparameters that decide nothing but how far a step goes."""


def _behave_equally(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two groups differ in nothing but the learning rate, so that one trial speaks for both."""
    return left.keys() == right.keys() and all(key in _RATES or same_values(left[key], right[key]) for key in left)


def _trial_key(value: Any) -> tuple[Any, ...]:
    """The part of a hyperparameter's value that decides which states a rule has: the key of `_schemas`.

    Groups with equal keys share one trial step.
    """
    # Numbers above zero behave alike (a momentum of 0.9 or 0.95), zero often switches a rule or a state off.
    if isinstance(value, Mapping):
        return tuple((key, _trial_key(item)) for key, item in sorted(value.items()) if key not in _RATES)
    if isinstance(value, list | tuple):
        return tuple(_trial_key(item) for item in value)
    if value is None or isinstance(value, bool | str):
        return (value,)
    if isinstance(value, torch.Tensor):
        return (type(value).__name__, bool(value.any()))
    if isinstance(value, numpy.ndarray | numpy.generic | int | float):
        return (type(value).__name__, bool(numpy.any(value)))
    return (type(value).__name__,)


# ---------------------------------------------------------------------------------------------- attributes

# What a class may look at besides its groups and states: attributes, its own and the parameters'. Updates run on slices of
# parameters, in a copy of the optimizer that was made in `initialize`. Neither sees what becomes of such attributes later.

# Not looked at, or compared elsewhere: groups, states, and what torch's schedulers leave on the instance.
_OTHERWISE_KNOWN = frozenset({"state", "param_groups", "defaults", "step", "zero_grad", "_opt_called", "_step_count"})


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own attributes, as far as its class gave it any that a step may look at. Tensors are copied."""
    return {name: copy_scalar(vars(optimizer)[name]) for name in attribute_names(optimizer)}


def attribute_names(optimizer: Optimizer) -> list[str]:
    """Names of attributes that a step may read: private ones only if the class's own code has them."""
    names = _names_in(type(optimizer))  # type: ignore[arg-type]  # classes can be hashed
    return [
        name
        for name in vars(optimizer)
        if name not in _OTHERWISE_KNOWN
        and (not name.startswith("_") or (name in names and not name.endswith("_hooks")))
    ]


def is_of_the_class(optimizer: Optimizer, name: str) -> bool:
    """Whether ``name`` is a value that a class which is not torch's has for all its instances."""
    found = inspect.getattr_static(type(optimizer), name, None)
    own = [base for base in type(optimizer).__mro__ if not base.__module__.startswith("torch.")]
    return any(name in vars(base) for base in own) and not callable(found) and not hasattr(found, "__get__")


def refuse_attributes_of_parameters(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Refuse a class whose code names an attribute that somebody has set on a parameter, or that keeps values by parameter.

    Raises:
        OptimizerNotPageableError: which one.
    """
    params = list(params)
    identities = {id(param) for param in params}
    for name, value in vars(optimizer).items():
        # A dict from parameters, or from their ids, to values: slices are other tensors, for which it has none.
        keys = value if name not in _OTHERWISE_KNOWN and isinstance(value, Mapping | Set) else ()
        if any(id(key) in identities or (isinstance(key, int) and key in identities) for key in keys):
            raise OptimizerNotPageableError(
                type(optimizer).__name__,
                f"its attribute '{name}' is looked up by parameters, and the slices that it updates are others",
                cure="Put parameters that are treated alike into a group of their own, with an entry that says how; what "
                "has a value for each element can be done to gradients before the step",
            )
    given = {name for param in params for name in getattr(param, "__dict__", {})}
    found = sorted(given & _names_in(type(optimizer))) if given else []  # type: ignore[arg-type]
    if found:
        raise OptimizerNotPageableError(
            type(optimizer).__name__,
            f"it looks at the attribute '{found[0]}' of parameters, which the slices that it updates do not have",
            cure="Put those parameters into a group of their own, with an entry that says the same",
        )


@functools.lru_cache(maxsize=64)
def _names_in(cls: type[Optimizer]) -> frozenset[str]:
    """Names and texts in the code of a class, and in functions of its module that it calls."""
    names: set[str] = set()
    seen: set[types.CodeType] = set()

    def collect(code: types.CodeType, module: Mapping[str, Any]) -> None:
        if code in seen:
            return
        seen.add(code)
        # Strings as well: `getattr(p, "layer_scale")` names an attribute in a constant.
        names.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                collect(constant, module)
        for name in code.co_names:
            function = module.get(name)
            if isinstance(function, types.FunctionType) and function.__module__ == module.get("__name__"):
                collect(function.__code__, module)

    for base in cls.__mro__:
        for member in vars(base).values() if base is not object and not base.__module__.startswith("torch.") else ():
            function = inspect.unwrap(member)  # of torch's hooks for steps, and of what decorates it (no_grad)
            if isinstance(function, types.FunctionType):
                collect(function.__code__, function.__globals__)
    return frozenset(names)


# ------------------------------------------------------------------------------------------ what parts and rounding refuse

_KEY = "infinity.state_dtype"
_ONE_BYTE = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Lion})
"""Optimizers whose running means may be rounded to a byte."""
_RUNNING_MEANS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})
"""They forget what rounding did to them."""


def check_parts(
    wrapped_optimizer: WrappedOptimizer, updater: SliceUpdater, zero_stage: int, *, is_divided: bool
) -> None:
    """Refuse parts of parameters where the optimizer wants whole ones.

    Raises:
        OptimizerNotPageableError: ranks have parts of the states (``is_divided``) or of DTensors, or layers are paged in tiles.
    """
    if not updater.mixes_elements:
        return
    cut = [tiled for tiled in wrapped_optimizer.tiled.tiled if not tiled.by_expert or tiled.tiles[0].requires_grad]
    if any(getattr(param, "is_part_of_dtensor", False) for param in wrapped_optimizer.params()):
        problem = "with tensor parallelism by DTensors each rank has a part of them"
        cure = "Take an optimizer that treats every element by itself (AdamW, SGD, Lion), or do not divide the model"
    elif is_divided:
        problem = f"with zero_optimization.stage {zero_stage} each rank has a part of them"
        cure = "Set zero_optimization.stage to 0: each rank then pages all states, and they train as one"
    elif cut and all(tiled.by_expert for tiled in cut):
        problem, cure = "infinity.experts makes several of one", 'Set infinity.experts to "whole"'
    elif cut:
        problem, cure = "infinity.tile_above makes several of one", "Remove infinity.tile_above"
    else:
        return
    raise OptimizerNotPageableError(wrapped_optimizer.name, f"it updates whole parameters, and {problem}", cure=cure)


def check_state_format(form: StateFormat, wrapped_optimizer: WrappedOptimizer, updater: SliceUpdater) -> None:
    """Refuse what rounding would break.

    Raises:
        ConfigError: the optimizer updates whole parameters, or takes a root of a difference of two states (RMSprop with
            ``centered``), which rounding makes negative; or, with a byte per element, it is not one of Adam, AdamW, SGD and
            Lion, or keeps a maximum (``amsgrad``), which grows with every rounding up.
    """
    if form is StateFormat.FP32:
        return
    cls = type(wrapped_optimizer.optimizer)
    problem = ""
    if updater.mixes_elements:
        problem = f"rounded states are opened part by part, and {cls.__name__} updates whole parameters"
        cure = 'Set it to "fp32"'
    for index, group in enumerate(wrapped_optimizer.param_groups if not problem else ()):
        refused = [name for name in updater.state_names(index) if cls not in _ONE_BYTE or name not in _RUNNING_MEANS]
        if isinstance(wrapped_optimizer.optimizer, torch.optim.RMSprop) and group.get("centered"):
            problem = (
                f"{cls.__name__} with centered=True takes the root of a difference of two states, and between rounded ones that "
                "may be negative"
            )
            cure = 'Set it to "fp32", or centered to false'
        elif form.is_one_byte and refused:
            problem = (
                f"one byte per element is for the running means of Adam, AdamW, SGD and Lion, and {cls.__name__} keeps "
                f"'{refused[0]}'"
            )
            cure = 'Set it to "bf16" or "fp32"' + (", or amsgrad to false" if group.get("amsgrad") else "")
    if problem:
        raise ConfigError.value(_KEY, form.value, problem, cure=cure)
