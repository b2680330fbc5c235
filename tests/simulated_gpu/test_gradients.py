"""Gradients that come from a GPU and wait: what is known of them while they arrive is what will be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swapper import Swapper
from tests.internals import (
    CHUNK_GRANULE,
    Arrivals,
    ComputeDevice,
    FlatPool,
    GradientStore,
    MainGradDtype,
    Slot,
    StepClock,
    Unit,
    gradient_norm,
)
from tests.simulated_gpu import backend
from tests.simulated_gpu.device import SimulatedGpu
from tests.unit.stage import trainable_unit

backend.register_or_skip()

_SHAPES = [(70, 40), (33,)]
_UNIT_BYTES = 70 * 40 * 4 + 64 * 4
_Gradients = dict[Slot, torch.Tensor]


class _Store:
    """Units whose gradients stay in RAM, or go to NVMe, and a ring of so many bytes."""

    def __init__(self, swapper: Swapper, ring_bytes: int, *, stay: bool = True, dtype: torch.dtype = torch.float32):
        self.device = SimulatedGpu()
        self.units = [trainable_unit(index, _SHAPES, dtype) for index in range(3)]
        numel = sum(unit.layout.trainable_numel for unit in self.units)
        self.arrivals = Arrivals(self.device, ring_bytes)
        self.grads = GradientStore(
            self.units,
            self.device,
            StepClock(),
            in_memory=range(3) if stay else (),
            open_swapper=lambda: swapper,
            pool=FlatPool(ComputeDevice(), 2 * 4 * numel),
            arrivals=self.arrivals,
            main_dtype=MainGradDtype(dtype),
        )
        self.drawn = 0

    def draw(self, unit: Unit) -> _Gradients:
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        return {
            slot: torch.randn(slot.spec.shape, generator=generator).to(slot.spec.dtype) for slot in unit.layout.slots
        }

    def add(self, unit: Unit, gradients: _Gradients) -> None:
        self.grads.add(unit, {slot: each.to(backend.NAME, non_blocking=True) for slot, each in gradients.items()})

    def values(self, unit: Unit) -> _Gradients:
        """What an update would get."""
        found = {}
        source = self.grads.source(unit)
        (chunk,) = unit.layout.chunks(CHUNK_GRANULE * 64)
        scratch = torch.full((chunk.numel,), torch.nan, dtype=source.dtype)
        if (handle := source.prepare(chunk, scratch)) is not None:
            handle.wait()
        pieces = [piece for piece in chunk.slices if piece.slot in source.slots]
        values = source.of_chunk(chunk, pieces, scratch)
        for piece in pieces:
            part = values[piece.offset : piece.offset + piece.numel]
            found[piece.slot] = part.clone().reshape(piece.slot.spec.shape)
        source.release()
        return found

    def close(self) -> None:
        self.grads.close()
        self.arrivals.close()
        self.device.end()
        assert not self.device.order.races


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 22) as opened:
        yield opened


def _require_equal(found: _Gradients, expected: _Gradients) -> None:
    assert found.keys() == expected.keys()
    for slot, values in expected.items():
        assert torch.equal(found[slot].float(), values.float())


@pytest.mark.parametrize("stay", [True, False], ids=["in_memory", "spilled"])
@pytest.mark.parametrize("ring_bytes", [256, _UNIT_BYTES, 1 << 20], ids=["blocks", "one_unit", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_norms_are_those_of_what_came(
    dtype: torch.dtype, ring_bytes: int, stay: bool, swapper: Swapper
) -> None:
    store = _Store(swapper, ring_bytes, stay=stay, dtype=dtype)
    first, second, third = store.units
    expected = {unit.index: store.draw(unit) for unit in store.units}
    for unit in store.units:
        store.add(unit, expected[unit.index])
    again = store.draw(second)
    store.add(second, again)
    expected[1] = {slot: each.float() + again[slot].float() for slot, each in expected[1].items()}
    for unit in store.units:
        assert store.grads.slots_with_gradient(unit) == list(unit.layout.slots)
        for slot in unit.layout.slots:
            norm = store.grads.norms_of(unit)[slot.index]
            assert torch.equal(norm.cpu(), gradient_norm(expected[unit.index][slot]))
            is_alone = unit is not second
            assert (norm.device.type == backend.NAME) == is_alone, "of a sum it is taken where the sum is"
    for unit in (third, first, second):
        _require_equal(store.values(unit), expected[unit.index])
    assert not store.grads.has_any
    store.close()


def test_nobody_waits_while_there_is_room(swapper: Swapper) -> None:
    store = _Store(swapper, 1 << 20)
    for unit in store.units:
        store.add(unit, store.draw(unit))
        assert store.grads.has_any
        assert store.grads.slots_with_gradient(unit) == list(unit.layout.slots)
        assert not store.grads.is_available(unit)
    assert not store.device.synchronisations
    assert len(store.arrivals.coming) == 3
    store.grads.norms_of(store.units[0])[store.units[0].layout.slots[0].index]
    assert len(store.arrivals.coming) == 2, "those of other units are not waited for"
    store.close()


def test_what_goes_into_an_update_in_backward_waits_for_nothing(swapper: Swapper) -> None:
    store = _Store(swapper, 1 << 20)
    unit = store.units[0]
    gradients = store.draw(unit)
    on_device = {slot: each.to(backend.NAME) for slot, each in gradients.items()}
    assert store.grads.send_ahead(unit, on_device) is on_device, "there is nothing to add them to"
    store.add(unit, gradients)
    assert store.grads.send_ahead(unit, on_device) == {}
    store.device.synchronisations.clear()
    while not store.grads.have_arrived(unit):
        pass
    assert not store.device.synchronisations
    norms: dict[tuple[int, int], torch.Tensor] = {}
    source = store.grads.add_for_update(unit, {}, norms)
    (chunk,) = unit.layout.chunks(CHUNK_GRANULE * 64)
    for piece in chunk.slices:
        expected = 2 * gradients[piece.slot]
        assert torch.equal(norms[0, piece.slot.index].cpu(), gradient_norm(expected))
        values = source.of_chunk(chunk, [piece], torch.empty(chunk.numel))
        assert torch.equal(values[piece.offset : piece.offset + piece.numel], expected.flatten())
    source.release()
    store.close()


def test_a_norm_is_taken_again_where_somebody_has_looked(swapper: Swapper) -> None:
    store = _Store(swapper, 1 << 20)
    unit = store.units[0]
    slot = unit.layout.slots[0]
    store.add(unit, store.draw(unit))
    store.grads.show(unit).view(slot).mul_(3)
    store.grads.on_change(unit)
    changed = store.grads.show(unit).view(slot).clone()
    assert torch.equal(store.grads.norms_of(unit)[slot.index].cpu(), gradient_norm(changed))
    store.close()


def test_an_update_fetches_gradients_behind_what_made_them(swapper: Swapper) -> None:
    store = _Store(swapper, 1 << 20)
    unit = store.units[0]
    gradients = {slot: each.to(backend.NAME) * 2 for slot, each in store.draw(unit).items()}
    expected = {slot: each.cpu() for slot, each in gradients.items()}
    source = store.grads.add_for_update(unit, gradients, {})
    (chunk,) = unit.layout.chunks(CHUNK_GRANULE * 64)
    for piece in chunk.slices:
        values = source.of_chunk(chunk, [piece], torch.empty(chunk.numel))
        assert torch.equal(values[piece.offset : piece.offset + piece.numel], expected[piece.slot].flatten())
    source.release()
    store.close()
