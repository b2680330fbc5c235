"""What the optimizer's groups, ``requires_grad`` and the model's modules say when a step begins.

Storage for states is laid out once, for the parameters that are trainable when `initialize` takes the model over. All else
may change from step to step, as in plain torch: which parameters are in which group, with which hyperparameters, which are
frozen, and what modules the model has.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.device.compute import gradient_norm
from infinity.errors import ModelError
from infinity.gradients.norms import ParameterNorm, is_part
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.groups import Groups, Members
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.paging.parameter_map import ParameterMap
from infinity.threads.frames import callers
from infinity.torch_internals.names import functional_call, without_torch_function
from infinity.units.layout import Slot
from infinity.units.parameter import plain_grad
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState

_FUNCTIONAL_CALL = functional_call.__code__

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class StepGroups:
    """Reads the groups, and refuses what cannot be trained as torch would, before anything is changed.

    Args:
        parameter_map, wrapped_optimizer, updater: whom it works with.
        names_of: a unit -> names of the per-element states that its records have room for.
        states: of parameters that have room for one, by (unit index, slot index).
        await_update: returns when no update of a unit is pending.
        loose: what came into the groups later.
    """

    parameter_map: ParameterMap
    wrapped_optimizer: WrappedOptimizer
    updater: SliceUpdater
    names_of: Callable[[Unit], Sequence[str]]
    states: Mapping[tuple[int, int], ParameterState]
    await_update: Callable[[Unit], None]
    loose: LooseParameters

    def __post_init__(self) -> None:
        self._frozen: list[nn.Parameter] = []
        self._trainable: list[nn.Parameter] = []
        for unit in self.parameter_map.units:
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                (self._trainable if slot.spec.is_trainable else self._frozen).append(parameter)
        self._flags: list[bool] | None = None
        self._fits: tuple[Members, list[tuple[str, ...]]] | None = None
        """Members and state names of each group at the last check that all parameters fit."""
        self._known_names: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        """For each group its hyperparameters as last seen, and the names of the states that they lead to."""
        self._strangers: set[int] = set()
        """Ids of parameters that a warning has named. The id of a freed parameter may be reused: then the new one is not
        named."""

    def read(self) -> Groups:
        """The groups as they are now.

        Raises:
            ModelError: a parameter is in two groups; a parameter is to be trained, or to keep another state, and there
                is no place for that.
            OptimizerNotPageableError: the hyperparameters make the optimizer mix elements, or an attribute of it was
                changed.
        """
        groups = self.wrapped_optimizer.read()
        self.updater.check_attributes()
        self._check_thawed(groups)
        self._check_states(groups)
        return groups

    def begin(self) -> Groups:
        """`read`, for a step. What the optimizer itself has against a step now, it raises here, before anything is updated."""
        groups = self.read()
        # A trial step of a class that is not known, whose result is discarded. What the optimizer refuses, it raises
        # here.
        for values in groups.values:
            self.updater.advanced(values, has_gradient=True)
        return groups

    def described(self, groups: Groups) -> dict[str, str]:
        """Numbers, words and members of the groups, by name, and the optimizer: what has to be the same on all ranks."""
        # A checksum in place of names: ranks exchange it in every step. Positions, because ids differ between
        # processes.
        indices = [*map(groups.members.index_of.get, map(id, self._trainable))]
        found = {
            "the optimizer": type(self.wrapped_optimizer.optimizer).__qualname__,
            "the number of groups": str(len(groups.values)),
            "the group of each parameter (a checksum)": f"{zlib.crc32(repr(indices).encode()):08x}",
        }
        for index, values in enumerate(groups.values):
            for name, value in values.items():
                if name == "initial_lr":  # what a schedule has noted: it decides nothing
                    continue
                if isinstance(value, torch.Tensor):
                    found[f"'{name}' of group {index}"] = str(value.tolist())
                elif isinstance(value, bool | int | float | str | tuple | list | None):  # others may print an address
                    found[f"'{name}' of group {index}"] = str(value)
        return found

    def before_forward(self) -> bool:
        """Check what `read` checks before a forward that will be trained on, and that whatever is new gets trained.

        Returns whether other parameters are frozen than the last time.
        """
        self._check_new(self.read())
        # `without_torch_function`: reading an attribute of a paged parameter would otherwise go through its __torch_function__.
        with without_torch_function():
            flags = [parameter.requires_grad for parameter in self._trainable]
        changed = self._flags is not None and flags != self._flags
        self._flags = flags
        return changed

    def _check_thawed(self, groups: Groups) -> None:
        with without_torch_function():  # see `before_forward`
            thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        for parameter in thawed:
            if groups.index_of(parameter) is not None:
                fqn = self.wrapped_optimizer.fqn(parameter)
                raise ModelError.unprepared(
                    fqn,
                    "was frozen in infinity.initialize, and either in no parameter group or in an adapter's base, so "
                    "no space was reserved for its gradient and state",
                    cure="Put it into a parameter group before infinity.initialize (it may stay frozen), or call "
                    "optimizer.add_param_group. (For an adapter's base, call requires_grad_(True) before "
                    "infinity.initialize. Convert a frozen fp64 constant to fp32 before infinity.initialize)",
                )

    def _check_states(self, groups: Groups) -> None:
        names_by_group = self._names_by_group(groups)
        # Who is in which group, with which state names: unchanged in nearly all steps, so parameters are not looked
        # through.
        if self._fits == (groups.members, names_by_group):
            return
        for parameter in self._trainable:
            index = groups.index_of(parameter)
            if index is None:
                continue
            names = names_by_group[index]
            unit, slot = self.parameter_map.locate(parameter)
            present = self._present_names(unit, slot)
            missing = [name for name in names if name not in present]
            if missing:
                raise ModelError.unprepared(
                    slot.spec.fqn,
                    f"needs the state '{missing[0]}' with the hyperparameters of its group ({index}), and no space "
                    "was reserved for it",
                    cure="Set hyperparameters that decide which state exists (momentum, amsgrad, centered) before "
                    "infinity.initialize",
                )
        self._fits = groups.members, names_by_group

    def _present_names(self, unit: Unit, slot: Slot) -> Sequence[str]:
        """Per-element states that a parameter has, after the updates asked for; before its first one, those with room."""
        state = self.states.get((unit.index, slot.index))
        if state is not None and state.is_fresh:
            self.await_update(unit)  # its first may be pending
        names = self.names_of(unit)
        return names if state is None or state.names is None else [name for name in names if name in state.names]

    def _names_by_group(self, groups: Groups) -> list[tuple[str, ...]]:
        known, self._known_names = self._known_names, []
        for index, values in enumerate(groups.values):
            before, names = known[index] if index < len(known) else ({}, ())
            if not _are_same(before, values):  # else nothing has to be found out: there may be a thousand groups
                names = self.updater.schema_under(values).elementwise
            self._known_names.append((values, names))
        return [names for _, names in self._known_names]

    def _check_new(self, groups: Groups) -> None:
        """Trainable parameters that came into the model later: in no group, they are not trained."""
        present: Mapping[int, torch.Tensor] = self.parameter_map.parameters_now()
        new = {
            key: parameter
            for key, parameter in present.items()
            if key not in self.parameter_map.places
            and isinstance(parameter, nn.Parameter)  # functional_call puts other tensors in their places for a while
            and groups.index_of(parameter) is None
            and parameter.requires_grad
        }
        if not new or new.keys() <= self._strangers:
            return
        if any(frame.f_code is _FUNCTIONAL_CALL for frame in callers()):  # which puts parameters in place for a while
            return
        names = {id(parameter): fqn for fqn, parameter in self.parameter_map.model.named_parameters()}
        fqn = names.get(next(iter(new)), "?")
        problem = (
            f"{len(new)} trainable parameters were added to the model after infinity.initialize (the first is '{fqn}')"
        )
        cure = (
            "Add modules (get_peft_model, say) before infinity.initialize, or put them into a group: "
            'optimizer.add_param_group({"params": [...]})'
        )
        with without_torch_function():
            trains = any(p.requires_grad for p in present.values() if groups.index_of(p) is not None)
        if not trains:
            raise ModelError(f"{problem}, and no other is left to be trained. {cure}", fqn=fqn)
        self._strangers.update(new)
        logger.warning("%s and are in no parameter group: they will not be trained. %s", problem, cure)

    def not_held(self) -> list[torch.Tensor]:
        """Parameters that came into the model or into a group later: autograd adds to their gradients by itself."""
        found: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in self.loose.present()}
        found |= self.parameter_map.parameters_now()
        return [parameter for parameter in found.values() if not self.parameter_map.holds(parameter)]

    def ungrouped(self) -> frozenset[tuple[int, int]]:
        """Parameters that may have a gradient and are in no group, as (unit index, slot index): `zero_grad` skips
        them."""
        members = self.wrapped_optimizer.members().index_of
        return frozenset(
            (unit.index, slot.index)
            for unit in self.parameter_map.units
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
            if id(parameter) not in members and (slot.spec.is_trainable or plain_grad(parameter) is not None)
        )

    def advance(self, groups: Groups, updated: Iterable[tuple[int, int]]) -> None:
        """The optimizer's step has ended: its groups have what it writes into them, a count of steps for one.

        Args:
            groups: as they were before the step.
            updated: (unit index, slot index) of what had a gradient.
        """
        units = self.parameter_map.units
        # Loose parameters are in no unit: autograd keeps their gradients.
        parameters: list[torch.Tensor] = [units[unit].parameters[slot] for unit, slot in updated]
        parameters += [parameter for parameter in self.loose.present() if parameter.grad is not None]
        with_gradient = {*map(groups.members.index_of.get, map(id, parameters))}
        for index, (group, values) in enumerate(zip(self.wrapped_optimizer.param_groups, groups.values, strict=True)):
            group.update(self.updater.advanced(values, has_gradient=index in with_gradient))

    def norms_in_order(
        self, norms: Mapping[tuple[int, int], torch.Tensor], factor: float, *, is_divided: bool
    ) -> list[ParameterNorm]:
        """Norms of all gradients, in the order in which ``clip_grad_norm_(model.parameters(), ...)`` takes them.

        Those of parameters in the groups that are not the model's come last.

        Args:
            norms: of the main gradients, by (unit index, slot index).
            factor: what brings gradients that autograd adds to by itself to the scale of those.
            is_divided: other processes may have other parts of a parameter.
        """
        found: list[ParameterNorm] = []
        loose = {id(parameter): parameter for parameter in self.loose.present()}
        # A dict by id, so that a parameter that is both in the model and in a group counts once, where the model has
        # it.
        for parameter in (self.parameter_map.parameters_now() | loose).values():
            place = self.parameter_map.places.get(id(parameter))
            if place is not None:
                unit, slot = place
                norm = norms.get((unit.index, slot.index))
                if norm is not None:
                    found.append(ParameterNorm(slot.spec.fqn, is_divided and is_part(parameter), norm))
                if slot.spec.is_trainable:
                    # Its gradient is a main gradient, not one that autograd keeps.
                    continue
            gradient = plain_grad(parameter)
            if gradient is not None:
                fqn = f"loose parameter {len(found)}"
                found.append(ParameterNorm(fqn, is_divided and is_part(parameter), _norm(gradient.detach()) * factor))
        return found


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """2-norm of a gradient that autograd has: of any kind that torch's optimizers take."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient_norm(gradient.float())


def _are_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two groups have the very same objects as hyperparameters, the learning rate aside."""
    return len(left) == len(right) and all(left.get(key, left) is value or key == "lr" for key, value in right.items())
