"""Sums of several micro-batches' gradients: whole and in time, whenever the last gradient came."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.distributed.collectives import Ranks
from infinity.gradients.main_gradients import Arrivals, MainGradDtype
from infinity.gradients.reducer import ReducedGradients
from infinity.metrics.clock import StepClock
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.vertical.step import UnitSums
from swapper import Swapper
from tests.unit.stage import trainable_unit


@pytest.fixture
def unit() -> Unit:
    return trainable_unit(0, [(70, 40), (33,)], torch.bfloat16)


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 22) as opened:
        yield opened


def _spilling(unit: Unit, swapper: Swapper) -> ReducedGradients:
    return ReducedGradients(
        [unit],
        ComputeDevice(),
        StepClock(),
        in_memory=(),
        open_swapper=lambda: swapper,
        arrivals=Arrivals(ComputeDevice(), 0),
        pool=FlatPool(ComputeDevice(), unit.layout.trainable_numel * 4),
        main_dtype=MainGradDtype(),
        ranks=Ranks(),
        holds_back=lambda: False,
        wire=torch.float32,
    )


def _all(unit: Unit, value: float) -> dict[Slot, torch.Tensor]:
    return {slot: torch.full(slot.spec.shape, value, dtype=torch.bfloat16) for slot in unit.layout.slots}


def test_a_unit_that_is_complete_later_than_its_last_gradient_is_spilled_then(unit: Unit, swapper: Swapper) -> None:
    """Not only when the step asks: until then it would hold memory, and nothing would be left to hide its write behind."""
    store = _spilling(unit, swapper)

    def deliver(unit: Unit, gradients: dict[Slot, torch.Tensor], *, updates_now: bool) -> None:
        store.add(unit, gradients)

    stepper: Any = SimpleNamespace(gradients=store, deliver=deliver)
    sums = UnitSums(stepper, ComputeDevice(), False, 0)
    for _ in range(2):
        sums.add(unit, _all(unit, 1.0))
    sums.end_moment({})
    assert swapper.statistics().write_bytes == 0
    sums.end_moment({unit.index: unit})
    swapper.flush()
    assert swapper.statistics().write_bytes == unit.layout.trainable_numel * 4
    store.close()
