"""Engine parts put together by hand, without config, files or optimizer: a model whose weights rest in plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.loop.backward import Backwards
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.loop.parameter_handler import ParameterHandler
from infinity.loop.phase import PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.metrics.clock import StepClock
from infinity.paging.assigned import AssignedData
from infinity.paging.parameter_cache import ParameterCache, WeightWriter
from infinity.paging.parameter_map import ParameterMap
from infinity.threads.engine_lock import EngineLock
from infinity.tiers.user_copies import UserCopies
from infinity.units.layout import ParameterSpec, Slot, UnitLayout
from infinity.units.parameter import hold, plain_grad, set_plain_grad
from infinity.units.partition import partition
from infinity.units.unit import Arrival, Unit, spec_of


class Arrived:
    """Weights that are there at once."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True

    def promote(self) -> None: ...


class TensorSource:
    """Gives each unit the bytes that were stored for it, and notes who asked."""

    def __init__(self) -> None:
        self.stored: dict[int, torch.Tensor] = {}
        self.fetched: list[int] = []

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        self.fetched.append(unit.index)
        if unit.index in self.stored:
            unit.flat.tensor().copy_(self.stored[unit.index])
        return Arrived()


def make_parameter_cache(
    units: Sequence[Unit],
    source: TensorSource | None,
    capacity_bytes: int,
    *,
    prefetches: bool,
    guess: Sequence[int] | None = None,
    writer: WeightWriter | None = None,
    experts: Mapping[int, int] | None = None,
) -> ParameterCoordinator:
    """A coordinator over host memory. It guesses that units are needed in order, unless told otherwise."""
    parameter_cache = ParameterCache(
        units,
        FlatPool(ComputeDevice(), capacity_bytes),
        source,
        StepClock(),
        prefetches=prefetches,
        guess=[unit.index for unit in units] if guess is None else guess,
        budget=("infinity.host_memory_budget", capacity_bytes),
        writer=writer,
        experts=experts,
    )
    nothing: Any = SimpleNamespace(
        updated=set(), num_micro_batches=1, global_steps=0, begin_forward=lambda: None, check_consistent=lambda: None
    )
    # Not a `ParameterMap`: some units here have no parameters.
    places = {
        id(p): (unit, slot) for unit in units for slot, p in zip(unit.layout.slots, unit.parameters, strict=False)
    }
    parameter_map: Any = SimpleNamespace(units=units, num_owners=dict, places=places)
    lock, guard = EngineLock(), PhaseGuard(nothing, nothing)
    backwards = Backwards(parameter_map, parameter_cache, lock, nothing, guard, nothing, LoopStyle(nothing), nothing)
    return ParameterCoordinator(parameter_map, parameter_cache, lock, backwards, nothing, UserCopies())


class PlainHandler(ParameterHandler):
    """Gradients are autograd's."""

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return plain_grad(parameter)

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        set_plain_grad(parameter, gradient)


def make_handler(
    parameter_map: ParameterMap, coordinator: ParameterCoordinator
) -> tuple[ModuleHooks, ParameterHandler]:
    """Hooks and handler of a model that no engine has."""
    hooks = ModuleHooks(parameter_map, coordinator)
    nobody: Any = None
    return hooks, PlainHandler(parameter_map, hooks, coordinator, nobody, nobody, nobody, AssignedData())


def frozen_unit(index: int, num_pages: int) -> Unit:
    """A unit of ``num_pages`` times 4096 bytes, without parameters."""
    numel = num_pages * 1024
    return Unit(index, f"unit {index}", [], UnitLayout([ParameterSpec("p", (numel,), (1,), torch.float32, False)]))


def trainable_unit(index: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Unit:
    """A unit of trainable parameters that no engine holds."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    specs = [spec_of(f"unit{index}.p{number}", p, dtype) for number, p in enumerate(parameters)]
    return Unit(index, f"unit {index}", parameters, UnitLayout(specs))


class TensorWriter:
    """Stores what was written into units where a `TensorSource` finds it."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        return False

    def is_urgent(self, unit: Unit) -> bool:
        return unit.is_persistent

    def store_written(self, unit: Unit) -> None:
        self._source.stored[unit.index] = unit.flat.tensor().clone()
        unit.forget_changes()


class Held:
    """A model under a coordinator: everything about parameters is as in an engine, nothing about training is.

    Attributes:
        values: what each parameter really is.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        is_paged: bool = True,
        room: int | None = None,
        stores_writes: bool = True,
    ) -> None:
        self.model = model
        named = dict(model.named_parameters())
        self.values = {fqn: p.detach().to(dtype).clone() for fqn, p in named.items()}
        self.units = [
            Unit(
                index,
                members.name,
                [named[fqn] for fqn in members.fqns],
                UnitLayout([spec_of(fqn, named[fqn], dtype) for fqn in members.fqns]),
            )
            for index, members in enumerate(partition(model, dtype.itemsize))
        ]
        for unit in self.units:
            unit.is_persistent = not is_paged
        self.source = TensorSource()
        capacity = room or sum(unit.num_bytes for unit in self.units)
        writer = TensorWriter(self.source) if stores_writes else None
        source = self.source if is_paged else None
        self.coordinator = make_parameter_cache(self.units, source, capacity, prefetches=False, writer=writer)
        self.parameter_map = ParameterMap(model, self.units)
        self.module_hooks, self.parameter_handler = make_handler(self.parameter_map, self.coordinator)
        for unit in self.units:
            base = torch.zeros(unit.num_bytes, dtype=torch.uint8)
            for slot in unit.layout.slots:
                unit.view(base, slot).copy_(self.values[slot.spec.fqn])
            self.source.stored[unit.index] = base
            if not is_paged:
                flat = self.coordinator.parameter_cache.pool.allocate(unit.num_bytes)
                flat.tensor().copy_(base)
                self.coordinator.parameter_cache.place(unit, flat)
            for parameter in unit.parameters:
                hold(parameter, self.parameter_handler, dtype, torch.device("cpu"))

    def install(self) -> None:
        """Hook the model, so that its forward and backward page."""
        self.module_hooks.install(self, lambda parameters: None, lambda gathered: None)

    def stored(self, fqn: str) -> torch.Tensor:
        """A parameter as it rests."""
        unit, slot = self.parameter_map.locate(self.model.get_parameter(fqn))
        self.coordinator.parameter_cache.collect_all()
        if self.coordinator.parameter_cache._source is None:
            return unit.view(unit.flat.tensor(), slot).clone()
        return unit.view(self.source.stored[unit.index], slot).clone()
