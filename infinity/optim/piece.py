"""Updating a parameter piece by piece with the user's own optimizer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from infinity.errors import OptimizerNotPageableError
from infinity.optim.attributes import attributes_of, refuse_attributes_of_parameters
from infinity.optim.probe import (
    StateSchema,
    advanced,
    copy_scalar,
    learn_schema,
    probe_groups,
    probe_pageable,
    probe_whole,
)
from infinity.optim.registry import is_known, mixes_elements
from infinity.optim.template import Template
from infinity.optim.values import same_values
from infinity.optim.worker import Worker, hyperparameters


class PieceUpdater:
    """Runs the template's optimizer class on one piece of one parameter at a time, or on one parameter (`mixes_elements`).

    It knows the optimizer's class and which state it keeps; it must not know where weights, gradients and state come
    from. `update` may be called from any thread, and from several at a time if `is_for_threads`. Nothing global is
    touched: no random generator, no thread count, no hook.

    Args:
        template: gives class, attributes and hyperparameters. A class that is not one of the known ones is probed here.

    Raises:
        OptimizerNotPageableError: a parameter's update depends on other parameters, or its state has another form than one
            value per element and single values.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._worker = Worker(template.optimizer)
        self._of_thread = threading.local()
        self._device = template.device
        self._schemas: dict[tuple[Any, ...], StateSchema] = {}
        self._elementwise: frozenset[str] = frozenset()
        self._is_known = is_known(type(template.optimizer))
        self.mixes_elements = mixes_elements(type(template.optimizer))
        """Whether a parameter has to be updated as a whole: its elements' updates depend on each other."""
        self._is_laid_out = False
        """From the end of construction on others rely on `mixes_elements`."""
        if not self._is_known:
            refuse_attributes_of_parameters(template.optimizer, template.params())
        self._attributes = attributes_of(template.optimizer)
        self._has_moved = False
        tried: list[dict[str, Any]] = []
        with _without_gradients(template.params()):  # whatever the optimizer holds on to, a trial is not to change it
            for group in template.param_groups if not self._is_known else ():
                worker = Worker(template.optimizer)  # forms of states are a better reason than bits that differ
                learn_schema(worker, worker.training(hyperparameters(group)), self._device)
            for group in template.param_groups:
                values = hyperparameters(group)
                if not any(_behave_equally(other, values) for other in tried):
                    self._schemas.pop(_kind(values), None)  # a rule nobody knows may look at more than the kind
                    self.schema_under(values)
                    tried.append(values)
            if len(template.param_groups) > 1 and not self._is_known:
                schemas = [self.schema_under(hyperparameters(group)) for group in template.param_groups]
                worker = Worker(template.optimizer)
                probe_groups(worker, [*map(worker.training, template.snapshots())], schemas, self._device)
            if not self._is_known:
                self._refuse_shared_entries()
        if tried and not self._is_known and not self._has_moved:
            raise OptimizerNotPageableError(
                self._worker.name,
                "its step() changes no weight in its own groups: it seems to pass the work on to another optimizer",
                cure="Pass that one; what is done around its steps can be done in the training loop, to weights inside "
                "`with infinity.GatheredParameters(...)`",
            )
        self._is_laid_out = True

    def _refuse_shared_entries(self) -> None:
        """In torch, what a step writes into a tensor in one group is there when it comes to the next."""
        seen: set[int] = set()
        for group in self._template.param_groups:
            for name in self.advanced(
                Worker(self._template.optimizer).training(hyperparameters(group)), has_gradient=True
            ):
                if isinstance(group.get(name), Tensor) and id(group[name]) in seen:
                    raise OptimizerNotPageableError(
                        self._worker.name,
                        f"its step() writes to an entry of its parameter groups, and '{name}' is one tensor of several groups",
                        cure="Give each group a tensor of its own",
                    )
                seen.add(id(group.get(name)))

    def schema_under(self, values: Mapping[str, Any]) -> StateSchema:
        """What these hyperparameters make the optimizer keep of a parameter.

        It is found out by a trial for each combination of switches, and of values that are zero or not.

        Raises:
            OptimizerNotPageableError: a trial step fails, or, in a class that is not a known one, mixes elements.
        """
        found = self._schemas.get(_kind(values))
        if found is None:
            worker = Worker(self._template.optimizer)  # of its own: updates may be running in another thread
            tried = values if self._is_known else worker.training(values)
            found = learn_schema(worker, tried, self._device)
            if not self._is_known:
                self._has_moved |= self._probe(worker, tried, found)
                # What it counts in the group is no longer zero after a step: the trial has been there.
                self._schemas[_kind(advanced(worker, tried, found, self._device))] = found
            self._schemas[_kind(values)] = found
            self._elementwise |= frozenset(found.elementwise)
        return found

    def _probe(self, worker: Worker, values: Mapping[str, Any], schema: StateSchema) -> bool:
        """Returns whether any weight was changed."""
        if not self.mixes_elements:
            try:
                return probe_pageable(worker, values, schema, self._device)
            except OptimizerNotPageableError:
                if self._is_laid_out:
                    raise
        has_moved = probe_whole(worker, values, schema, self._device)
        self.mixes_elements = True
        return has_moved

    @property
    def is_for_threads(self) -> bool:
        """Whether pieces may be updated beside each other: of a class that nobody knows, instances may share memory.

        Whole parameters go one at a time, each on as many threads as in plain torch: sums depend on their number.
        """
        return self._is_known and not self.mixes_elements

    def _present_worker(self) -> Worker:
        """That of the calling thread, where several are allowed: a step is made in the worker's own groups and states."""
        if not self._is_known:
            return self._worker
        worker: Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            worker = self._of_thread.worker = Worker(self._template.optimizer)
        return worker

    def check_attributes(self) -> None:
        """Raise OptimizerNotPageableError if an attribute of the user's optimizer is another than in `initialize`."""
        if self._is_known:
            return
        now = attributes_of(self._template.optimizer)
        for name in sorted(now.keys() | self._attributes.keys()):
            if not same_values(now.get(name), self._attributes.get(name)):
                raise OptimizerNotPageableError(
                    self._worker.name,
                    f"its attribute '{name}' has changed since infinity.initialize, and updates go by what it was",
                    cure="Make it an entry of the parameter groups: those may change",
                )

    def advanced(self, values: Mapping[str, Any], *, has_gradient: bool) -> dict[str, Any]:
        """What a step changes in a group: entries with their values after it.

        Args:
            values: the group's hyperparameters before.
            has_gradient: whether any of its parameters has one.
        """
        if self._is_known:
            return {}
        worker = Worker(self._template.optimizer)  # of its own: updates may be running in another thread
        after = advanced(worker, values, self.schema_under(values), self._device, has_gradient=has_gradient)
        return {
            name: value for name, value in after.items() if name not in values or not same_values(value, values[name])
        }

    def names_under(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the float32 state tensors of a parameter's shape in `schema_under`."""
        return self.schema_under(values).elementwise

    def state_names(self, group_index: int) -> tuple[str, ...]:
        """`names_under` the hyperparameters that this group has now."""
        return self.names_under(hyperparameters(self._template.param_groups[group_index]))

    def update(
        self,
        group: Mapping[str, Any],
        weight: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor] | None,
        scalars: Mapping[str, Any],
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Update one piece. The result has the bits that a step on the whole parameter gives these elements.

        Args:
            group: hyperparameters of the parameter's group, see `Template.snapshot`. Not modified.
            weight: float32, 1-D, of any device; starts at a multiple of `probe.PIECE_ALIGNMENT` elements from the parameter's
                start and, unless it is the last piece, is such a multiple long. With `mixes_elements` it is the whole
                parameter, in its own shape. Changed in place.
            grad: like `weight`. It may be overwritten.
            state: a tensor like `weight` for each of `state_names`, changed in place. None in the parameter's first
                step: then the optimizer makes them.
            scalars: the parameter's, as they were before this step, the same for each piece. Not modified.

        Returns:
            The state (the given tensors, or new ones that the caller owns), and the scalars as they are after the step.

        Raises:
            OptimizerNotPageableError: the optimizer made state that it had not when it was taken over.
        """
        before: dict[str, Any] = {name: copy_scalar(value) for name, value in scalars.items()}
        if state is not None:
            before.update(state)
        own = (
            dict(group) if self._is_known else copy_scalar(dict(group))
        )  # each piece counts in it from the same number on
        (after,) = self._present_worker().run(own, [weight], [grad], [before])
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
                if value is not view:
                    view.copy_(value)
                tensors[name] = view
        return tensors, advanced

    def _grown(self, name: str) -> OptimizerNotPageableError:
        return OptimizerNotPageableError(
            self._worker.name,
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


def _kind(value: Any) -> tuple[Any, ...]:
    """What a trial step can depend on: switches, names, and whether a number is zero."""
    if isinstance(value, Mapping):
        return tuple((key, _kind(item)) for key, item in sorted(value.items()) if key not in _RATES)
    if isinstance(value, list | tuple):
        return tuple(_kind(item) for item in value)
    if value is None or isinstance(value, bool | str):
        return (value,)
    if isinstance(value, torch.Tensor):
        return (type(value).__name__, bool(value.any()))
    if isinstance(value, numpy.ndarray | numpy.generic | int | float):
        return (type(value).__name__, bool(numpy.any(value)))
    return (type(value).__name__,)
