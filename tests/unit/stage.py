"""Engine parts put together by hand, without config, files or optimizer: units, and who fetches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.loop.backward import Backwards
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.loop.phase import PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.metrics.clock import StepClock
from infinity.paging.parameter_cache import ParameterCache
from infinity.threads.engine_lock import EngineLock
from infinity.tiers.user_copies import UserCopies
from infinity.units.layout import ParameterSpec, UnitLayout
from infinity.units.unit import Arrival, Unit, spec_of


class Arrived:
    """Weights that are there at once."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True

    def promote(self) -> None: ...


class TensorSource:
    """Notes which units were asked for."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        self.fetched.append(unit.index)
        return Arrived()


def make_parameter_cache(
    units: Sequence[Unit],
    source: TensorSource,
    capacity_bytes: int,
    *,
    prefetches: bool,
    guess: Sequence[int] | None = None,
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
        experts=experts,
    )
    nothing: Any = SimpleNamespace(
        updated=set(), num_micro_batches=1, global_steps=0, begin_forward=lambda: None, check_consistent=lambda: None
    )
    # Not a `ParameterMap`: the units here have no parameters.
    parameter_map: Any = SimpleNamespace(units=units, num_owners=dict, places={})
    lock, guard = EngineLock(), PhaseGuard(nothing, nothing)
    backwards = Backwards(parameter_map, parameter_cache, lock, nothing, guard, nothing, LoopStyle(nothing), nothing)
    return ParameterCoordinator(parameter_map, parameter_cache, lock, backwards, nothing, UserCopies())


def frozen_unit(index: int, num_pages: int) -> Unit:
    """A unit of ``num_pages`` times 4096 bytes, without parameters."""
    numel = num_pages * 1024
    return Unit(index, f"unit {index}", [], UnitLayout([ParameterSpec("p", (numel,), (1,), torch.float32, False)]))


def trainable_unit(index: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Unit:
    """A unit of trainable parameters that no engine holds."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    specs = [spec_of(f"unit{index}.p{number}", p, dtype) for number, p in enumerate(parameters)]
    return Unit(index, f"unit {index}", parameters, UnitLayout(specs))
