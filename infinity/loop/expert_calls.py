"""Calls of modules whose experts are paged one by one: fetching the experts that the router has chosen.

See [Note: experts] in `infinity.units.experts`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.errors import ModelError
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.paging.rank_weights import sum_over_ranks
from infinity.torch_internals.names import outside_modes, untraced
from infinity.units.experts import ExpertTiles, walk_along
from infinity.units.unit import Unit


@dataclass(eq=False)
class ExpertCalls:
    """The calls of one module of experts."""

    _coordinator: ParameterCoordinator
    _experts: list[ExpertTiles]
    _units: list[list[Unit]]
    """For each tensor of experts (gate_up, down), the unit of each expert."""
    _group: int
    """Id of this layer's group of experts in the prefetch schedule."""

    def before(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the module: start to read the experts that the router has chosen, in the order of their use."""
        if self._coordinator.parameter_cache.is_divided:
            self._agree(module)
        routed = self._experts[0].routed
        if routed is None:
            return
        if self._coordinator.is_training_forward:
            for tiles, units in zip(self._experts, self._units, strict=True):
                # As in torch, where the gradient of the whole tensor has zeros for experts without tokens.
                for expert in () if tiles.touched_only else tiles.others(routed):  # they get zeros
                    unit = units[expert]
                    self._coordinator.backwards.collector.on_module_call(unit, unit.layout.slots)
        # The order in which the model's own code uses the tiles. With experts 4 and 1 routed, in this order:
        #   grouped_mm     gate_up4 gate_up1 down4 down1    tensor by tensor, experts as routed
        #   batched_mm     gate_up1 gate_up4 down1 down4    tensor by tensor, experts by number
        #   eager          gate_up1 down1 gate_up4 down4    expert by expert
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if implementation == "grouped_mm":
            order = [units[expert] for units in self._units for expert in routed]
        elif implementation == "batched_mm":
            order = [units[expert] for units in self._units for expert in sorted(routed)]
        else:  # one expert after the other
            order = [units[expert] for expert in sorted(routed) for units in self._units]
        self._coordinator.route(self._group, [unit.index for unit in order])
        if not self._coordinator.is_shared:  # else each expert waits until its own moment
            for tiles, units in zip(self._experts, self._units, strict=True):
                tiles.bring_together(functools.partial(self._together, units))

    def _agree(self, module: nn.Module) -> None:
        """All ranks use the experts that the routers of all of them have chosen. All ranks come here."""
        first = self._experts[0]
        name = first.tiled.fqn.rpartition(".")[0]
        if first.counts is None:
            raise ModelError(
                f"'{name}' is called without the router's choice (a tensor of integers), so ranks cannot agree on which "
                "experts to gather",
                cure='Set infinity.experts to "whole"',
                fqn=name,
            )
        counts = sum_over_ranks(self._coordinator.parameter_cache, f"routing to {name}", first.counts)
        walk_along(module, self._experts, counts)

    def _together(
        self, units: list[Unit], experts: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], AbstractContextManager[None]]]:
        """Yield groups of experts that take half of the room each. Meanwhile the next group is read into the other
        half."""
        # Room for 10 experts: 5 are computed with while the next 5 arrive. One at least, even if that takes all the
        # room.
        size = max(self._coordinator.parameter_cache.room_bytes // 2 // units[0].num_bytes, 1)
        for start in range(0, len(experts), size):
            part = experts[start : start + size]
            yield part, self._inside([units[expert] for expert in part])

    @contextmanager
    def _inside(self, units: Sequence[Unit]) -> Iterator[None]:
        """As `ParameterCoordinator.inside_module`, for a group of experts, which is entered at once."""
        self._enter(units)
        try:
            yield
        finally:
            self._leave(units)

    @untraced
    @outside_modes
    def _enter(self, units: Sequence[Unit]) -> None:
        coordinator = self._coordinator
        coordinator.begin_forward(is_root=False)
        try:
            if coordinator.is_training_forward:
                for unit in units:
                    coordinator.backwards.collector.on_module_call(unit, unit.layout.slots)
            coordinator.enter(*units)
        except BaseException:
            coordinator.end_forward()
            raise

    @untraced
    @outside_modes
    def _leave(self, units: Sequence[Unit]) -> None:
        try:
            self._coordinator.leave(*units)
        finally:
            self._coordinator.end_forward()
