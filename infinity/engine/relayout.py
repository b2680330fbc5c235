"""New parameters in the optimizer's groups that have no room for states: the engine is laid out anew.

That is what `infinity.initialize` would do now. Weights and states are copied to the drives (into memory, if the config
names no drive), the parts are closed, the model is an ordinary one for a moment, and new parts are made around it. So
there is one plan at any time, whose budget holds. Engine, optimizer and parameters stay the same objects.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.engine.export_calls import ExportCalls
from infinity.errors import ModelError, StepError
from infinity.loop.phase import Phase
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.packed.sources import set_source
from infinity.units.adapters import is_base
from infinity.units.parameter import release_parameters
from swapper.sync.interrupts import uninterrupted


@dataclass
class _Contents:
    """What the old parts hold, copied for the new ones, by parameter."""

    weights: dict[nn.Parameter, torch.Tensor]
    mains: dict[nn.Parameter, torch.Tensor]
    """Main weights."""
    states: dict[nn.Parameter, dict[str, Any]]
    gradients: dict[nn.Parameter, torch.Tensor]
    packed: dict[nn.Parameter, tuple[str, torch.Tensor]]
    """Format and packed bytes. Unpacking and packing again might give other bytes."""
    loss_scale: dict[str, Any]


class Relayout(ExportCalls):
    """Part of the engine."""

    @property
    def loose(self) -> LooseParameters:
        """Parameters in the groups that no engine holds. The wrapped optimizer updates them as plain torch does."""
        return self._parts.groups.loose

    def _release_parts(self, rest: contextlib.ExitStack) -> None:
        raise NotImplementedError

    @property
    def num_not_held(self) -> int:
        """How many parameters came after `infinity.initialize` and are not held."""
        return len(self._parts.groups.not_held())

    def make_room(self) -> None:
        """Lay the engine out anew if parameters of the last group, which is new, have no room for their states.

        If that fails, the group is removed, the old layout is made again, and the error is raised.
        """
        contents: _Contents | None = None
        new: list[nn.Parameter] = []
        wrapped_optimizer = self._parts.wrapped_optimizer
        try:
            # Three stages. Until `_copy_contents` returns, an error only removes the group. During `_lay_out`, the old
            # parts are gone, so the old layout is made again from the copies.
            new = self._without_room()
            if not new:
                return
            self._check_relayout(new[0])
            contents = self._copy_contents()
            self._lay_out(contents)
        except BaseException:
            wrapped_optimizer.param_groups.pop()
            if contents is not None:
                # The plan gives trainable parameters room for states even without a group, and lack of room may be why
                # the layout failed. So the new ones are frozen while the old layout is made again.
                thawed = [parameter for parameter in new if parameter.requires_grad]
                try:
                    for parameter in thawed:
                        parameter.requires_grad_(False)
                    self._lay_out(contents)
                finally:
                    for parameter in thawed:
                        parameter.requires_grad_(True)
            raise

    def _without_room(self) -> list[nn.Parameter]:
        """Held parameters in the groups that have no room for states, and would get it in a new plan."""
        parts = self._parts
        is_left_out = is_base(self.module)
        return [
            parameter
            for parameter in parts.wrapped_optimizer.params()
            if not is_left_out(parameter)
            and parts.parameter_map.holds(parameter)
            and not parts.access.has_place(parameter)
            and parts.parameter_map.locate(parameter)[1].spec.dtype == self.config.compute_dtype
        ]

    def _check_relayout(self, parameter: nn.Parameter) -> None:
        parts = self._parts
        what = "optimizer.add_param_group() with a parameter of the model that was frozen and in no group until now"
        if parts.durable is not None:
            raise ModelError.unprepared(
                parts.wrapped_optimizer.fqn(parameter),
                "was frozen and in no group in infinity.initialize, and a durable run has reserved no space for its "
                "states",
                cure="Put it into a parameter group before infinity.initialize; it may stay frozen",
            )
        members = {id(member) for member in parts.wrapped_optimizer.params()}
        present = parts.parameter_map.parameters_now()
        for member in parts.wrapped_optimizer.known():
            is_gone = id(member) not in present and parts.parameter_map.holds(member)
            if is_gone and parts.access.has_place(member):
                raise ModelError.unprepared(
                    parts.wrapped_optimizer.fqn(member),
                    "was taken out of the model, and its states would be lost while groups get new parameters",
                    cure="Leave it in the model, frozen and as an attribute of any module, or take it out after "
                    "engine.close() and call infinity.initialize anew",
                )
            if id(member) not in members and parts.parameter_map.holds(member) and parts.access.has_state(member):
                raise ModelError.unprepared(
                    parts.wrapped_optimizer.fqn(member),
                    "has a state and is in no group, and that state would be lost when groups get new parameters",
                    cure="Put it into a group before, or delete its state: del optimizer.state[parameter]",
                )
        self._guard.check_not_cut_off()
        self._guard.check_consistent()
        if parts.coordinator.is_computing or parts.coordinator.num_gathered:
            raise StepError.order(
                what, "weights are in use", cure="Call it outside forward, backward and GatheredParameters"
            )

    def _copy_contents(self) -> _Contents:
        self.wait_for_checkpoint()
        self.flush()
        parts = self._parts
        access, copies = parts.access, parts.access.copies
        found = _Contents({}, {}, {}, {}, {}, parts.stepper.scaler.state())
        # A parameter with states that has left its group still gets room in the new plan, for those states.
        parts.wrapped_optimizer.reserve_states(
            [p for p in parts.wrapped_optimizer.known() if parts.parameter_map.holds(p) and access.has_place(p)]
        )
        for unit in parts.parameter_map.units:
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                with parts.coordinator.opened(unit):
                    # One unit at a time: `copies` puts large tensors on the drives, so memory holds one unit.
                    found.weights[parameter] = copies.copy(unit.weight(slot).cpu())
                stored = parts.stored.packed_bytes(unit, slot)
                if stored is not None and slot.spec.packed is not None:
                    found.packed[parameter] = slot.spec.packed, copies.copy(stored)
                if access.has_main_weights and access.has_place(parameter):
                    found.mains[parameter] = access.main_weight(parameter)
                if access.has_state(parameter):
                    found.states[parameter] = access.state(parameter)
                gradient = parameter.grad
                if gradient is not None:
                    found.gradients[parameter] = copies.copy(gradient.detach().clone())
        return found

    def _lay_out(self, contents: _Contents) -> None:
        """Make new parts around the model as it is now, and load ``contents`` into them."""
        with uninterrupted():
            self._dismantle(contents)
        with contextlib.ExitStack() as undo:
            parts = self._parts.anew(undo)
            originals = parts.take_model(undo)
            parts.stepper.follow(self._parts.stepper)
            self._connect(parts)
            self._paged.update_by(parts.updater, parts.consistent, parts.mains)
            undo.pop_all()
        originals.forget()
        # Main weights first: loading one also sets the model weight.
        access = parts.access
        for parameter, main in contents.mains.items():
            access.load_main_weight(parameter, main)
        for parameter, state in contents.states.items():
            access.load_state(parameter, state)
        for parameter, gradient in contents.gradients.items():
            parameter.grad = gradient
        parts.stepper.scaler.load_state(contents.loss_scale)

    def _dismantle(self, contents: _Contents) -> None:
        """Close the present parts. The model becomes an ordinary one, over the copies of its weights."""
        with contextlib.ExitStack() as rest:
            self._release_parts(rest)
            rest.callback(self._guard.move_to, Phase.CLOSED)
            for parameter, weight in contents.weights.items():
                # After `_release_parts` was pushed, which closes storage when the block ends: by then no parameter
                # refers to it.
                release_parameters([parameter])
                parameter.data = weight
                if parameter in contents.packed:
                    set_source(parameter, *contents.packed[parameter])
