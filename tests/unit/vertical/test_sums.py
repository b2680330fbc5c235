"""Sums of several micro-batches' gradients: whole and in time, whenever the last gradient came."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.device.compute import ComputeDevice, gradient_norm
from infinity.device.flat_pool import FlatPool
from infinity.distributed.collectives import Ranks
from infinity.gradients.main_gradients import Arrivals, MainGradDtype
from infinity.gradients.reducer import ReducedGradients
from infinity.metrics.clock import StepClock
from infinity.units.layout import CHUNK_GRANULE, Slot
from infinity.units.unit import Unit
from infinity.vertical.sums import UnitSums
from swapper import Swapper
from tests.unit.stage import trainable_unit


@pytest.fixture
def unit() -> Unit:
    return trainable_unit(0, [(70, 40), (33,)], torch.bfloat16)


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 22) as opened:
        yield opened


def _spilling(unit: Unit, swapper: Swapper, waiting: MainGradDtype) -> ReducedGradients:
    pool = FlatPool(ComputeDevice(), unit.layout.trainable_numel * 4)
    return ReducedGradients(
        [unit],
        ComputeDevice(),
        StepClock(),
        in_memory=(),
        open_swapper=lambda: swapper,
        arrivals=Arrivals(ComputeDevice(), 0),
        pool=pool,
        main_dtype=waiting,
        ranks=Ranks(),
        holds_back=lambda: False,
        wire=torch.float32,
    )


def _all(unit: Unit, value: float) -> dict[Slot, torch.Tensor]:
    return {slot: torch.full(slot.spec.shape, value, dtype=torch.bfloat16) for slot in unit.layout.slots}


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("looks_at_norms", [True, False])
def test_a_sum_that_nobody_closed_is_whole_for_the_update(
    unit: Unit, swapper: Swapper, looks_at_norms: bool, rounds: bool
) -> None:
    """Also in a second step: what was stored and kept of the first must not pass for it."""
    store = _spilling(unit, swapper, MainGradDtype(torch.bfloat16, rounds=rounds))
    for step in range(2):
        store.open_sum(unit)
        for value in (1.0, 2.0, float(step)):
            store.add(unit, _all(unit, value))
        for slot in unit.layout.slots if looks_at_norms else ():
            assert torch.equal(store.norms_of(unit)[slot.index], gradient_norm(torch.full(slot.spec.shape, 3.0 + step)))
        source = store.source(unit)
        for chunk in unit.layout.chunks(CHUNK_GRANULE):
            scratch = torch.full((chunk.numel,), torch.nan, dtype=source.dtype)
            handle = source.prepare(chunk, scratch)
            handle.wait()
            for piece in chunk.slices:
                assert set(scratch[piece.offset : piece.offset + piece.numel].tolist()) == {3.0 + step}
        source.release()
        with pytest.raises(KeyError):
            store.norms_of(unit)[0]
    store.close()


def test_a_unit_that_is_complete_later_than_its_last_gradient_is_spilled_then(unit: Unit, swapper: Swapper) -> None:
    """Not only when the step asks: until then it would hold memory, and nothing would be left to hide its write behind."""
    store = _spilling(unit, swapper, MainGradDtype())

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
