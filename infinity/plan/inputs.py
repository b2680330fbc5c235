"""The inputs of a plan: the model cut into units, and their sizes. Engines and `infinity plan` begin here.

The model may be on the meta device, since only shapes are used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from infinity.config import InfinityConfig
from infinity.device.host_memory import FreeMemory
from infinity.errors import ConfigError
from infinity.numerics.state_format import StateFormat
from infinity.optim.slice_updater import SliceUpdater, check_parts, check_state_format
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.packed.selection import packed_weights
from infinity.plan.cost_model import Traffic, place_for_schedule
from infinity.plan.machine import Bandwidth, RoomBytes
from infinity.plan.placement import Placement, with_codes_on_device
from infinity.plan.plan import Plan
from infinity.plan.sizes import Request, UnitSize, guessed_order
from infinity.plan.volumes import Volumes
from infinity.units.adapters import is_base
from infinity.units.experts import adapted_experts, experts_to_cut, routed_experts
from infinity.units.layout import UnitLayout
from infinity.units.partition import partition
from infinity.units.shards import Shards
from infinity.units.unit import Unit, is_float8, spec_of


@dataclass(frozen=True)
class PlanInputs:
    """What is decided before any file is opened or memory allocated.

    Attributes:
        units: the model's units.
        updater: runs the optimizer on slices of parameters.
        names: unit index -> names of the states in its records.
        with_states: (unit, slot) of every parameter with room for states.
        spans: for each unit, the elements [start, stop) of its trainable segment whose states this process keeps.
        sizes: of the units.
        request: what the config asks for.
        guess: the expected order of units in a micro-batch, until one has been recorded.
        budget_source: where the host memory budget comes from, in words.
        bandwidth: of the drives; None if unknown.
    """

    config: InfinityConfig
    units: list[Unit]
    updater: SliceUpdater
    names: dict[int, dict[str, None]]
    with_states: set[tuple[int, int]]
    spans: list[tuple[int, int]]
    sizes: list[UnitSize]
    request: Request
    guess: list[int]
    budget_source: str
    bandwidth: Bandwidth | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: InfinityConfig,
        wrapped_optimizer: WrappedOptimizer,
        free_memory: FreeMemory,
        *,
        uses_host_memory: bool,
        device_free_bytes: int | None,
        shards: Shards | None = None,
        divides_weights: bool = False,
        is_alone: bool = True,
        bandwidth: Bandwidth | None = None,
    ) -> PlanInputs:
        """Cut a model into units, and compute their sizes.

        Args:
            model, config, wrapped_optimizer: what is trained, how, and by which optimizer.
            free_memory: gives the budget if the config has none.
            uses_host_memory: whether the CPU computes.
            device_free_bytes: free memory of a GPU.
            shards: which part of the states this process keeps; None: all.
            divides_weights: whether weights that are not resident are divided as well (stage 3).
            is_alone: whether no other process averages gradients with this one.
            bandwidth: of the drives; None if unknown.

        Raises:
            ConfigError, OptimizerNotPageableError: the optimizer does not support how its states are stored.
            BudgetTooSmallError: a GPU has too little memory for packed weights.
        """
        shards = shards or Shards()
        updater = SliceUpdater(wrapped_optimizer)
        check_state_format(StateFormat(config.infinity.state_dtype), wrapped_optimizer, updater)
        check_parts(wrapped_optimizer, updater, config.zero_stage, is_divided=shards.is_divided)
        # A parameter that was added to the model after the optimizer was wrapped is not in it, and gets no unit
        # (below).
        packed = packed_weights(model, config.infinity.frozen_dtype, config.compute_dtype)
        # No room for states of base weights under adapters, which nobody thaws, nor of packed ones, which cannot be
        # updated. If the optimizer has states for them already, there must be room for those.
        is_left_out = is_base(model)
        with_states = [
            p
            for p in wrapped_optimizer.with_states()
            if p in wrapped_optimizer.reserved or not (is_left_out(p) or id(p) in packed)
        ]
        units = make_units(model, config, with_states, lambda parameter: parameter in wrapped_optimizer, packed)
        names = {unit.index: _state_names(unit, wrapped_optimizer, updater) for unit in units}
        budget = config.infinity.host_memory_budget
        routed = routed_experts(model)

        ask = functools.partial(
            Request.of,
            model=model,
            units=units,
            budget_bytes=budget if budget is not None else free_memory.budget_bytes,
            uses_host_memory=uses_host_memory,
            device_free_bytes=device_free_bytes,
            runs_in_parallel=updater.is_for_threads,
            updates_whole_parameters=updater.mixes_elements,
            is_alone=is_alone,
            bandwidth=bandwidth,
        )
        found = cls(
            config=config,
            units=units,
            updater=updater,
            names=names,
            with_states={
                (unit.index, slot.index) for unit in units for slot in unit.layout.slots if slot.spec.is_trainable
            },
            spans=[shards.span(unit) for unit in units],
            sizes=[
                UnitSize.of(
                    unit,
                    len(names[unit.index]),
                    shards,
                    divides_weights=divides_weights,
                    is_routed=all(id(parameter) in routed for parameter in unit.parameters),
                )
                for unit in units
            ],
            request=ask(config),
            guess=guessed_order(len(units), is_trained=bool(wrapped_optimizer.param_groups)),
            budget_source="from the config" if budget is not None else str(free_memory),
            bandwidth=bandwidth,
        )
        if not uses_host_memory:
            return dataclasses.replace(found, sizes=with_codes_on_device(found.sizes, found.request))
        if not config.infinity.update_is_open:
            return found
        # If a step moves no bytes, updates in backward hide no I/O, and only take cores from the model. On a CPU they
        # are faster after backward, with all cores. The config leaves the choice open (`update_is_open`).
        in_step = dataclasses.replace(config, infinity=dataclasses.replace(config.infinity, update="step"))
        after = dataclasses.replace(found, config=in_step, request=ask(in_step))
        return after if after.stays_in_memory() else found

    def stays_in_memory(self) -> bool:
        """Whether weights, states and gradients all fit into the budget, so that a step moves no bytes."""
        request = self.request
        # A cheap test first: most models are much larger than the budget, and `place` simulates.
        least = sum(request.record_bytes(unit) + unit.weight_bytes for unit in self.sizes)
        if least > request.budget_bytes:
            return False
        try:
            placement, _ = self.place()
        # Asked for `update: step` alone. If the update in backward does not fit either, `place` raises for the engine.
        except ConfigError:
            return False
        on_drives = placement.weights_on_nvme(len(self.units)) or placement.spills
        kept = zip(self.sizes, placement.states_in_memory, strict=True)
        return not on_drives and all(unit.state_numel == numel for unit, numel in kept)

    def place(self) -> tuple[Placement, str | None]:
        """Divide the budgets. See `place_for_schedule` for the second result.

        Raises:
            BudgetTooSmallError, ConfigError: what the config asks for cannot be had.
        """
        return place_for_schedule(self.config.infinity.schedule, self.sizes, self.request, self.guess)

    def plan(self, placement: Placement, reason_against: str | None, room_bytes: RoomBytes) -> Plan:
        """The plan of a placement, with predictions.

        Args:
            placement, reason_against: the results of `place`.
            room_bytes: returns how many bytes fit into directories.
        """
        retention, durable = self.volumes(placement).retention, self.config.infinity.durable
        if retention is not None and durable is not None:
            retention = dataclasses.replace(retention, room_bytes=room_bytes(durable.directories))
        slots = [slot for unit in self.units for slot in unit.layout.slots]
        expects_vertical = self.config.infinity.schedule == "vertical" and reason_against is None
        return Plan(
            num_parameters=sum(slot.numel for slot in slots),
            num_trainable=sum(slot.numel for slot in slots if slot.spec.is_trainable),
            sizes=tuple(self.sizes),
            request=self.request,
            placement=placement,
            order=tuple(self.guess),
            backward_start=len(self.sizes),
            host_budget_source=self.budget_source,
            traffic=Traffic(is_vertical=expects_vertical),
            bandwidth=self.bandwidth,
            drive_tbw=self.config.infinity.drive_tbw,
            retention=retention,
        ).predicted()

    def volumes(self, placement: Placement) -> Volumes:
        """The volumes that a placement needs on drives."""
        return Volumes.of(self.config, self.sizes, self.request, placement)


def make_units(
    model: nn.Module,
    config: InfinityConfig,
    grouped: Iterable[nn.Parameter] | None = None,
    takes: Callable[[nn.Parameter], bool] = lambda parameter: True,
    packed: Mapping[int, str] | None = None,
) -> list[Unit]:
    """Cut a model into units.

    Args:
        model, config: the model, and the options that decide about units.
        grouped: parameters of the optimizer's groups, which get room for states. None: all that require a gradient.
        takes: whether a parameter gets a unit.
        packed: ``id`` of a parameter -> the format in which it is stored if it gets no room for states.
    """
    by_name = {fqn: parameter for fqn, parameter in model.named_parameters() if takes(parameter)}
    trained = [p for p in by_name.values() if p.requires_grad] if grouped is None else list(grouped)
    # With fp32, plain torch casts nothing, so frozen fp64 constants in an fp32 model keep their dtype. A model that is
    # fp64 throughout is converted, as the config asks for fp32.
    keeps_double = config.compute_dtype == torch.float32 and any(
        (parameter.requires_grad or not trained) and parameter.dtype != torch.float64 for parameter in by_name.values()
    )
    # Frozen parameters in a group get room as well: a script may thaw them later, and a layout cannot grow. Float8 and
    # fp64 constants cannot be trained here, so they get none.
    with_states = {
        id(parameter)
        for parameter in trained
        if parameter.requires_grad
        or (
            parameter.is_floating_point()
            and not is_float8(parameter.dtype)
            and not (keeps_double and parameter.dtype == torch.float64)
        )
    }
    units: list[Unit] = []
    found = partition(model, config.compute_dtype.itemsize, config.infinity.units, takes)
    for index, members in enumerate(found):
        parameters = [by_name[fqn] for fqn in members.fqns]
        specs = [
            spec_of(
                fqn,
                parameter,
                config.compute_dtype,
                keeps_double=keeps_double,
                is_trainable=id(parameter) in with_states,
                packed=(packed or {}).get(id(parameter)),
            )
            for fqn, parameter in zip(members.fqns, parameters, strict=True)
        ]
        layout = UnitLayout(specs, StateFormat(config.infinity.state_dtype).block_numel)
        units.append(Unit(index, members.name or type(model).__name__, parameters, layout))
    return units


def _state_names(unit: Unit, wrapped_optimizer: WrappedOptimizer, updater: SliceUpdater) -> dict[str, None]:
    """Names of the states in a unit's records: those of its parameters' groups. A dict as an ordered set."""
    # Groups may have other states: SGD with momentum has one, without it none. A record has the states of all of them.
    groups = wrapped_optimizer.param_groups
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    trained = [p for slot, p in zip(unit.layout.slots, unit.parameters, strict=True) if slot.spec.is_trainable]
    found = {group_of.get(id(parameter)) for parameter in trained}
    indices = sorted(index for index in found if index is not None)
    if None in found:  # a parameter in no group: a script may add it to any of them later
        indices += range(len(groups))
    return dict.fromkeys(name for index in indices for name in updater.state_names(index))


def experts_of_config(model: nn.Module, config: InfinityConfig) -> list[tuple[str, nn.Module, list[str]]]:
    """The experts that are paged one by one, as the config says: see `infinity.units.experts.fused_experts`.

    Raises:
        ConfigError: the config asks for it, and adapters add to all experts at once.
    """
    choice = config.infinity.experts
    if choice in ("by_expert", "touched_only") and (adapted := adapted_experts(model)) is not None:
        raise ConfigError.value(
            "infinity.experts",
            choice,
            f"PEFT's target_parameters add adapters to the experts of '{adapted}' by one operation on the tensor of all of them",
            cure='Set it to "auto" or "whole", which page those experts with their layer; or take their names out of '
            "target_parameters: adapters on attention leave experts to be paged one by one",
        )
    return experts_to_cut(model, choice, is_paged=config.offload_param.device == "nvme")
