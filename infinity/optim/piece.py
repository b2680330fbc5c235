"""Updating a parameter piece by piece with the user's own optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infinity.errors import OptimizerNotPageableError
from infinity.optim.probe import PIECE_ALIGNMENT, StateSchema, copy_scalar, learn_schema, probe_pageable
from infinity.optim.registry import is_known_elementwise
from infinity.optim.template import Template
from infinity.optim.worker import Worker, hyperparameters

__all__ = ["PIECE_ALIGNMENT", "PieceUpdater"]


class PieceUpdater:
    """Runs the template's optimizer class on one piece of one parameter at a time.

    It knows the optimizer's class and which state it keeps; it must not know where weights, gradients and state come
    from. `update` is for one thread at a time, which may be another than the one that made the updater. Nothing global
    is touched: no random generator, no thread count, no hook.

    Args:
        template: gives class, attributes and hyperparameters. A class that is not one of the known element-wise ones is
            probed here.

    Raises:
        OptimizerNotPageableError: the optimizer's state cannot be cut into pieces, or pieces give other bits.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._worker = Worker(template.optimizer)
        self._device = template.device
        self._schemas: list[StateSchema] = []
        learned: list[tuple[dict[str, Any], StateSchema]] = []
        for group in template.param_groups:
            values = hyperparameters(group)
            schema = next((schema for known, schema in learned if _behave_equally(known, values)), None)
            if schema is None:
                schema = learn_schema(self._worker, values, self._device)
                if not is_known_elementwise(type(template.optimizer)):
                    probe_pageable(self._worker, values, schema, self._device)
                learned.append((values, schema))
            self._schemas.append(schema)
        self._elementwise = frozenset(name for schema in self._schemas for name in schema.elementwise)

    def state_names(self, group_index: int) -> tuple[str, ...]:
        """Names of the float32 state tensors of a parameter's shape that this group's parameters have."""
        return self._schemas[group_index].elementwise

    def scalar_names(self, group_index: int) -> tuple[str, ...]:
        """Names of the values kept once per parameter of this group, such as `step`."""
        return self._schemas[group_index].scalars

    def state_names_under(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """`state_names` as they would be with other hyperparameters, e.g. those of a state dict to be loaded."""
        # A worker of its own: updates may be running in another thread.
        return learn_schema(Worker(self._template.optimizer), hyperparameters(group), self._device).elementwise

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
            weight: float32, 1-D, of any device; starts at a multiple of `PIECE_ALIGNMENT` elements from the parameter's
                start and, unless it is the last piece, is such a multiple long. Changed in place.
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
        (after,) = self._worker.run(dict(group), [weight], [grad], [before])
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


def _behave_equally(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two groups differ in nothing but the learning rate, so that one trial speaks for both."""
    neutral = {"lr", "initial_lr"}
    return left.keys() == right.keys() and all(
        key in neutral or bool(left[key] is right[key] or left[key] == right[key]) for key in left
    )
