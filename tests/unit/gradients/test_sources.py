"""Gradients on their way into an update: in their parameters' order, and whatever memory is free first goes to who comes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.gradients.main_gradients import Arrivals
from infinity.gradients.store import GradientStore
from infinity.metrics.clock import StepClock
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from swapper import Swapper
from tests.unit.stage import trainable_unit

_SHAPES = [(70, 40), (33,)]
_FP32_BYTES = 4


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 22) as opened:
        yield opened


def _make(
    swapper: Swapper, room_for: int, in_memory: tuple[int, ...] = ()
) -> tuple[GradientStore, list[Unit], FlatPool]:
    units = [trainable_unit(index, _SHAPES) for index in range(4)]
    pool = FlatPool(ComputeDevice(), room_for * units[0].layout.trainable_numel * _FP32_BYTES)
    store = GradientStore(
        units,
        ComputeDevice(),
        StepClock(),
        in_memory=in_memory,
        open_swapper=lambda: swapper,
        arrivals=Arrivals(ComputeDevice(), 0),
        pool=pool,
    )
    return store, units, pool


def _ones(unit: Unit) -> dict[Slot, torch.Tensor]:
    return {slot: torch.ones(slot.spec.shape) for slot in unit.layout.slots}


@pytest.mark.parametrize("ended", [0, 1])
def test_room_comes_from_the_loan_that_ends_first(swapper: Swapper, ended: int) -> None:
    store, units, pool = _make(swapper, room_for=2)
    sources = [store.add_for_update(unit, _ones(unit), {}) for unit in units[:2]]
    assert pool.used_bytes == pool.capacity_bytes
    timer = threading.Timer(0.05, sources[ended].release)
    timer.start()
    third = store.add_for_update(units[2], _ones(units[2]), {})
    timer.join()
    sources[1 - ended].release()
    third.release()
    store.close()


_HUGE_PAGE = 2 << 20


def _large(swapper: Swapper, room_bytes: int) -> tuple[GradientStore, list[Unit], FlatPool]:
    """Units whose gradients take 4, 4 and 6 huge pages."""
    units = [trainable_unit(index, [(pages << 9, 1 << 10)]) for index, pages in enumerate((4, 4, 6))]
    pool = FlatPool(ComputeDevice(), room_bytes)
    store = GradientStore(
        units,
        ComputeDevice(),
        StepClock(),
        in_memory=(),
        open_swapper=lambda: swapper,
        arrivals=Arrivals(ComputeDevice(), 0),
        pool=pool,
    )
    return store, units, pool


def test_memory_that_an_update_has_used_up_makes_room_before_it_ends(swapper: Swapper) -> None:
    store, units, pool = _large(swapper, 10 * _HUGE_PAGE)
    first, second = (store.add_for_update(unit, _ones(unit), {}) for unit in units[:2])
    chunks = units[0].layout.chunks(1 << 19)
    assert len(chunks) == 4

    def use_up() -> None:
        for chunk in chunks[:3]:
            first.on_used(chunk)
        second.on_used(chunks[0])

    timer = threading.Timer(0.05, use_up)
    timer.start()
    third = store.add_for_update(units[2], _ones(units[2]), {})
    timer.join()
    assert pool.used_bytes == pool.capacity_bytes
    rest = first.of_chunk(chunks[3], chunks[3].slices, torch.empty(0)).clone()
    assert torch.equal(rest, torch.ones(1 << 19)), "what is not used up is left alone"
    for source in (first, second, third):
        source.release()
    store._retire()
    assert pool.used_bytes == 0
    store.close()
