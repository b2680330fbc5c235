"""Main gradients: in memory, spilled, or left on a device, they are the same bits as torch's own accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from infinity.device.compute import ComputeDevice, gradient_norm
from infinity.device.flat_pool import FlatPool
from infinity.gradients import sources as gradient_sources
from infinity.gradients.norms import clip_coefficient, total_norm
from infinity.gradients.sources import GradientSource, in_slot_order
from infinity.gradients.store import GradientStore
from infinity.gradients.unit_grads import MainGradDtype
from infinity.metrics.clock import StepClock
from infinity.units.layout import CHUNK_GRANULE, Slot
from infinity.units.unit import Unit
from swapper import Swapper
from tests.separate_host import SeparateHostDevice
from tests.unit.stage import trainable_unit

_SHAPES = [(70, 40), (33,), (1,), (5, 3, 7)]
_FP32_BYTES = 4


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 22) as opened:
        yield opened


def _units(dtype: torch.dtype, count: int = 3) -> list[Unit]:
    return [trainable_unit(index, _SHAPES, dtype) for index in range(count)]


def _bytes_of(units: Sequence[Unit]) -> int:
    return sum(unit.layout.trainable_numel * _FP32_BYTES for unit in units)


_NARROW = MainGradDtype(torch.bfloat16)


def _store(
    units: Sequence[Unit],
    swapper: Swapper,
    in_memory: Sequence[int],
    device: ComputeDevice | None = None,
    waiting: MainGradDtype | None = None,
    room: int | None = None,
) -> GradientStore:
    # What the plan gives: the units that are kept, and scratch for one more.
    itemsize = _FP32_BYTES if waiting is None else waiting.dtype.itemsize
    kept = _bytes_of([units[index] for index in in_memory]) * itemsize // _FP32_BYTES
    pool = FlatPool(ComputeDevice(), room or kept + _bytes_of(units[:1]))
    return GradientStore(
        units,
        device or ComputeDevice(),
        StepClock(),
        in_memory=in_memory,
        open_swapper=lambda: swapper,
        pool=pool,
        waiting=waiting,
    )


def _draw(unit: Unit, seed: int, dtype: torch.dtype, skip: Sequence[int] = ()) -> dict[Slot, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        slot: (torch.randn(slot.spec.shape, generator=generator) * 10 ** (seed % 3)).to(dtype)
        for slot in unit.layout.slots
        if slot.index not in skip
    }


def _sum(parts: Sequence[dict[Slot, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """As a loop in plain torch accumulates: main gradient += gradient.float()."""
    total: dict[int, torch.Tensor] = {}
    for part in parts:
        for slot, gradient in part.items():
            value = gradient.float()
            total[slot.index] = value if slot.index not in total else total[slot.index] + value
    return total


def _collect(source: GradientSource, unit: Unit) -> dict[int, torch.Tensor]:
    """What an update would see, chunk by chunk; then the source is used up."""
    wanted = {slot.index for slot in source.slots()}
    found = {slot.index: torch.full((slot.numel,), torch.nan) for slot in source.slots()}
    for chunk in unit.layout.chunks(CHUNK_GRANULE):
        scratch = torch.full((chunk.numel,), torch.nan, dtype=source.dtype)
        handle = source.prepare(chunk, scratch)
        if handle is not None:
            handle.wait()
        pieces = [piece for piece in chunk.pieces if piece.slot.index in wanted]
        gradients = source.of_chunk(chunk, pieces, scratch)
        for piece in pieces:
            values = gradients[piece.offset : piece.offset + piece.numel]
            assert values.dtype == source.dtype
            found[piece.slot.index][piece.start : piece.stop] = values
            values.zero_()  # an optimizer may overwrite what it gets
    source.release()
    return {index: values.view(unit.layout.slots[index].spec.shape) for index, values in found.items()}


def _require_equal(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for index, values in expected.items():
        assert torch.equal(found[index], values), f"slot {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_memory", [(0, 1, 2), (), (1,)], ids=["all in memory", "all spilled", "some spilled"])
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("device", [ComputeDevice, SeparateHostDevice])
def test_gradients_handed_over_in_backward_are_the_same(
    swapper: Swapper, dtype: torch.dtype, in_memory: Sequence[int], num_before: int, device: type[ComputeDevice]
) -> None:
    units = _units(dtype)
    store = _store(units, swapper, in_memory, device())
    for step in range(2):
        for unit in reversed(units):
            parts = [_draw(unit, 10 * step + n, dtype, skip=[n]) for n in range(num_before + 1)]
            for part in parts[:-1]:
                store.add(unit, part)
            norms: dict[tuple[int, int], torch.Tensor] = {}
            source = store.hand_over(unit, parts[-1], norms)
            expected = _sum(parts)
            assert {slot: norm for (_, slot), norm in norms.items()}.keys() == expected.keys()
            for slot, values in expected.items():
                assert torch.equal(norms[unit.index, slot], gradient_norm(values))
            assert not store.slots_with_gradient(unit), "they are the update's now"
            _require_equal(_collect(source, unit), expected)
    store.close()


def test_what_becomes_wider_stays_in_ram_where_there_is_room(swapper: Swapper) -> None:
    units = _units(torch.bfloat16, 5)
    # All of them as bf16, scratch for one as fp32, and one that may become fp32.
    room = _bytes_of(units) // 2 + 2 * _bytes_of(units[:1])
    store = _store(units, swapper, range(5), waiting=_NARROW, room=room)
    for number in range(2):
        for unit in units:
            store.add(unit, _draw(unit, number, torch.bfloat16))
    assert [store._of(unit).stays for unit in units] == [True, False, True, False, True], "each that goes makes room"
    for unit in units:
        expected = _sum([_draw(unit, number, torch.bfloat16) for number in range(2)])
        _require_equal(_collect(store.source(unit), unit), expected)
    store.close()


def test_a_gradient_of_another_dtype_makes_its_unit_wider(swapper: Swapper) -> None:
    (unit,) = _units(torch.bfloat16, 1)
    for in_memory in ((0,), ()):
        store = _store([unit], swapper, in_memory, waiting=_NARROW, room=2 * _bytes_of([unit]) - 1)
        odd = {slot: gradient / 3 for slot, gradient in _draw(unit, 1, torch.float32).items()}
        store.add(unit, odd)
        _require_equal(_collect(store.source(unit), unit), _sum([odd]))
        store.close()


def test_adding_block_by_block_gives_the_same_bits(swapper: Swapper, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = trainable_unit(0, [(5000,)], torch.bfloat16)
    parts = [_draw(unit, number, torch.bfloat16) for number in range(3)]
    for block_numel in (64, 1000, 1 << 20):
        monkeypatch.setattr(gradient_sources, "_BLOCK_NUMEL", block_numel)
        store = _store([unit], swapper, (0,))
        for part in parts:
            store.add(unit, part)
        _require_equal(_collect(store.source(unit), unit), _sum(parts))
        store.close()


def test_gradients_are_reordered_like_their_parameters() -> None:
    unit = trainable_unit(0, [(4, 6)])
    slot = unit.layout.slots[0]
    gradient = torch.arange(24.0).view(6, 4).t()
    ordered = in_slot_order(gradient, slot)
    assert torch.equal(ordered, gradient)
    assert ordered.stride() == slot.spec.stride
    assert in_slot_order(ordered, slot) is ordered
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2], [1, 3]]), torch.tensor([1.0, 2.0]), (4, 6), check_invariants=True
    )
    assert torch.equal(in_slot_order(sparse, slot), sparse.to_dense())


def test_the_total_norm_and_the_clipping_are_torchs(swapper: Swapper) -> None:
    unit = trainable_unit(0, _SHAPES)
    gradients = list(_draw(unit, 4, torch.float32).values())
    norm = total_norm([gradient_norm(gradient) for gradient in gradients])
    assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))
    assert total_norm([]) == 0
    for maximum in (0.3, 1e9):
        parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, maximum)
        coefficient = clip_coefficient(norm, maximum)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient * coefficient)
