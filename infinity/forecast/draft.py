"""The first half of building an engine, which needs no data: units, sizes, placement and plan. For engines, and for forecasts.

Knows a model's shapes, which may be all there is of it (the meta device); must not open files or move bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from infinity.checkpoint.adapters import is_base
from infinity.config import InfinityConfig
from infinity.device.host_memory import FreeShare
from infinity.errors import BudgetTooSmallError, ConfigValueError
from infinity.numerics.state_format import StateFormat
from infinity.optim.piece import PieceUpdater
from infinity.optim.state_support import check_parts, check_state_format
from infinity.optim.template import Template
from infinity.planning.cost_model import place_for_schedule
from infinity.planning.inputs import Request, UnitSize, guessed_order, make_units
from infinity.planning.placement import Placement
from infinity.planning.plan_tracker import PlanTracker, first_plan
from infinity.planning.resting import resting_bytes
from infinity.planning.volumes import Volumes
from infinity.units.shares import Shares
from infinity.units.unit import Unit
from swapper.volumes.directory import Directory


@dataclass(frozen=True)
class Draft:
    """What is decided before anything is opened.

    Attributes:
        units: the model, cut.
        updater: the optimizer, on pieces.
        names: for each unit's index, the names of the states that its records have room for.
        with_room: (unit, slot) of every parameter with room for states.
        spans: of each unit's trainable segment, the elements whose states this process has: from, to.
        sizes: of the units.
        request: what the config asks for.
        guess: the order of need before the first micro-batch is recorded.
    """

    config: InfinityConfig
    units: list[Unit]
    updater: PieceUpdater
    names: dict[int, dict[str, None]]
    with_room: set[tuple[int, int]]
    spans: list[tuple[int, int]]
    sizes: list[UnitSize]
    request: Request
    guess: list[int]
    budget_source: str

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: InfinityConfig,
        template: Template,
        share: FreeShare,
        *,
        shares_host_memory: bool,
        device_free_bytes: int | None,
        shares: Shares | None = None,
        divides_weights: bool = False,
        is_alone: bool = True,
    ) -> Draft:
        """Cut a model, and take down what its placement has to know.

        Args:
            model, config, template: what is to be trained, how, and by which optimizer.
            share: of the host's memory, what is taken where the config leaves that open.
            shares_host_memory: whether the device computes in host memory.
            device_free_bytes: of a device that has its own.
            shares: which part of the states is this process's; None: all of them.
            divides_weights: whether weights that do not stay in memory are divided as the states are.
            is_alone: whether no other process averages gradients with this one.

        Raises:
            ConfigValueError, OptimizerNotPageableError: the optimizer does not go with how its states are to be kept.
        """
        shares = shares or Shares()
        updater = PieceUpdater(template)
        check_state_format(StateFormat(config.infinity.state_dtype), template, updater)
        check_parts(template, updater, config.zero_stage, is_divided=shares.is_divided)
        # What came into the model since the template was made stays an ordinary parameter.
        units = make_units(model, config, _with_room(model, template), lambda parameter: parameter in template)
        groups = template.param_groups
        group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        names: dict[int, dict[str, None]] = {}
        with_room = set()
        for unit in units:
            found: set[int | None] = set()
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if slot.spec.is_trainable:
                    with_room.add((unit.index, slot.index))
                    found.add(group_of.get(id(parameter)))
            indices = sorted(index for index in found if index is not None)
            if None in found:  # one has left its group, and may come into any
                indices += range(len(groups))
            names[unit.index] = dict.fromkeys(name for index in indices for name in updater.state_names(index))
        spans = [shares.span(unit) for unit in units]
        kept_bytes = [sum(stop - start for start, stop in shares.weight_spans(unit)) for unit in units]
        held = [[shares.span(unit, rank) for rank in shares.holders] for unit in units]
        copied = [
            sum(stop - start for start, stop in of_unit) - (span[1] - span[0])
            for of_unit, span in zip(held, spans, strict=True)
        ]
        budget = config.infinity.host_memory_budget
        request_of = functools.partial(
            Request.of,
            model=model,
            units=units,
            budget_bytes=budget if budget is not None else share.budget_bytes,
            shares_host_memory=shares_host_memory,
            device_free_bytes=device_free_bytes,
            runs_in_parallel=updater.is_for_threads,
            updates_whole_parameters=updater.mixes_elements,
            is_alone=is_alone,
        )
        draft = cls(
            config=config,
            units=units,
            updater=updater,
            names=names,
            with_room=with_room,
            spans=spans,
            sizes=[
                UnitSize.of(unit, len(names[unit.index]), stop - start, kept if divides_weights else None, more)
                for unit, (start, stop), kept, more in zip(units, spans, kept_bytes, copied, strict=True)
            ],
            request=request_of(config),
            guess=guessed_order(len(units), is_trained=bool(template.param_groups)),
            budget_source="from the config" if budget is not None else str(share),
        )
        if not (shares_host_memory and config.infinity.update_is_open):
            return draft
        # Where nothing waits for a drive, updates beside the model only take its cores: they are faster after it.
        in_step = dataclasses.replace(config, infinity=dataclasses.replace(config.infinity, update="step"))
        after = dataclasses.replace(draft, config=in_step, request=request_of(in_step))
        return after if after.stays_in_memory() else draft

    def stays_in_memory(self) -> bool:
        """Whether the budget holds weights, states and gradients, so that a step moves nothing."""
        request = self.request
        least = sum(request.record_bytes(unit) + unit.weight_bytes for unit in self.sizes)
        if least > request.budget_bytes:
            return False
        try:
            placement, _ = self.place()
        except (BudgetTooSmallError, ConfigValueError):  # as the other request will be, if it has to be
            return False
        on_drives = placement.weights_on_nvme(len(self.units)) or placement.spills
        kept = zip(self.sizes, placement.states_in_memory, strict=True)
        return not on_drives and all(unit.state_numel == numel for unit, numel in kept)

    def place(self) -> tuple[Placement, str | None]:
        """Divide the budgets; also gives why steps go in the ordinary order, None if they go vertically.

        Raises:
            BudgetTooSmallError, ConfigValueError: what the config asks for cannot be had.
        """
        return place_for_schedule(self.config.infinity.schedule, self.sizes, self.request, self.guess)

    def tracker(
        self,
        placement: Placement,
        reason_against: str | None,
        room_bytes: Callable[[Sequence[Directory]], int | None],
    ) -> PlanTracker:
        """What keeps the plan of a placement, with drives that have so much room in some directories (None: no limit).

        ``reason_against``: what `place` gave with the placement.
        """
        resting = resting_bytes(self.sizes, self.request, placement)
        retention, durable = self.volumes(placement).retention, self.config.infinity.durable
        if retention is not None and durable is not None:
            retention = dataclasses.replace(retention, room_bytes=room_bytes(durable.directories))
        plan = first_plan(self.config, self.units, self.request, placement, resting, self.budget_source, retention)
        expects_vertical = self.config.infinity.schedule == "vertical" and reason_against is None
        return PlanTracker(plan, self.sizes, self.request, self.guess, expects_vertical=expects_vertical)

    def volumes(self, placement: Placement) -> Volumes:
        """What is opened on drives with a placement."""
        return Volumes.of(self.config, self.sizes, self.request, placement)


def _with_room(model: nn.Module, template: Template) -> Sequence[nn.Parameter]:
    """What gets room for states: all but the weights under adapters, unless these have it already."""
    is_left_out = is_base(model)
    return [p for p in template.with_room() if template.keeps_room(p) or not is_left_out(p)]
