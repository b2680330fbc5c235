"""The division of the budget: its parts fit into it, and a budget that is refused is refused with the true minimum."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infinity.errors import BudgetTooSmallError, ConfigError
from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.plan.cost_model import best_placement, predict
from infinity.plan.placement import DEVICE_KEY, HOST_KEY, Placement, place
from infinity.plan.sizes import Request, UnitSize, guessed_order
from infinity.plan.staging_sizes import price_of_chunks
from infinity.units.layout import CHUNK_GRANULE
from tests.unit.plan.planned import request_of

_FP32_BYTES = 4
_FORMATS = {
    "fp32": ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT),
    "bf16": ChunkFormat(torch.bfloat16, MainWeight.FP32),
    "remainder": ChunkFormat(torch.bfloat16, MainWeight.REMAINDER),
    "bf16 states": ChunkFormat(torch.bfloat16, MainWeight.REMAINDER, StateFormat.BF16),
    "int8 states": ChunkFormat(torch.bfloat16, MainWeight.REMAINDER, StateFormat.INT8),
    "int8 states, fp32": ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT, StateFormat.INT8),
}
_PAGE = 4096
_request = functools.partial(request_of, record_format=_FORMATS["bf16"])


@st.composite
def _units(draw: st.DrawFn, itemsize: int) -> list[UnitSize]:
    num_states = draw(st.integers(0, 3))
    numels = draw(st.lists(st.one_of(st.just(0), st.integers(1, 4000)), min_size=1, max_size=7))
    assume(any(numels))
    units = []
    for index, granules in enumerate(numels):
        frozen_bytes = draw(st.integers(0, 50)) * _PAGE if granules else draw(st.integers(1, 2000)) * _PAGE
        numel = granules * CHUNK_GRANULE
        weight_bytes = -(-numel * itemsize // _PAGE) * _PAGE + frozen_bytes
        states = num_states if granules else 0
        units.append(UnitSize(f"unit {index}", weight_bytes, numel, states, frozen_bytes == 0))
    return units


@st.composite
def _questions(draw: st.DrawFn) -> tuple[list[UnitSize], Request]:
    record_format = draw(st.sampled_from(list(_FORMATS.values())))
    param_tier = draw(st.sampled_from(["none", "cpu", "nvme"]))
    optimizer_tier = draw(st.sampled_from(["none", "cpu", "nvme"]))
    can_spill = "nvme" in (param_tier, optimizer_tier)
    waiting = [(4, False), *([(2, True)] if record_format.weight_dtype == torch.bfloat16 else [])]
    if can_spill and record_format.weight_dtype == torch.bfloat16:
        waiting.append((2, False))
    gradient_itemsize, rounds_gradients = draw(st.sampled_from(waiting))
    return draw(_units(record_format.weight_dtype.itemsize)), Request(
        budget_bytes=1 << 50,
        device_budget_bytes=None,
        param_tier=param_tier,
        optimizer_tier=optimizer_tier,
        record_format=record_format,
        uses_host_memory=draw(st.booleans()),
        update=draw(st.sampled_from(["in_backward", "deferred", "step"])),
        num_micro_batches=draw(st.sampled_from([1, 3])),
        staging_buffer_bytes=draw(st.one_of(st.none(), st.integers(60_000, 5_000_000))),
        prefetches=draw(st.booleans()),
        can_spill=can_spill,
        gradient_itemsize=gradient_itemsize,
        rounds_gradients=rounds_gradients,
    )


def _host_bytes(placement: Placement, request: Request) -> int:
    """What an engine with this placement takes of host memory."""
    return (
        placement.kept_bytes
        + (placement.weights_bytes if request.uses_host_memory else 0)
        + placement.num_staging_buffers * placement.staging_buffer_bytes
        + placement.num_upload_buffers * placement.upload_buffer_bytes
        + (0 if placement.gradients_on_device else placement.gradient_bytes)
        + placement.landing_bytes
    )


def _minimum(units: list[UnitSize], request: Request) -> int:
    try:
        return place(units, dataclasses.replace(request, budget_bytes=0)).minimum_bytes  # all of it is on the device
    except BudgetTooSmallError as error:
        assert error.key == HOST_KEY
        return error.minimum_bytes


def _require_sound(placement: Placement, units: list[UnitSize], request: Request) -> None:
    total = _host_bytes(placement, request)
    assert total <= request.budget_bytes, f"{total - request.budget_bytes} bytes too many"
    widest = max(unit.num_states for unit in units)
    assert placement.chunk_numel % CHUNK_GRANULE == 0
    assert placement.chunk_numel > 0
    assert request.record_format.workspace_bytes(placement.chunk_numel, widest) <= placement.staging_buffer_bytes
    assert placement.staging_buffer_bytes % _PAGE == 0
    if request.staging_buffer_bytes is not None:
        assert placement.staging_buffer_bytes <= request.staging_buffer_bytes + _PAGE
    assert placement.num_staging_buffers == 0 if request.records_on_device else placement.num_staging_buffers >= 3
    sizes = [unit.weight_bytes for unit in units]
    moving = [size for index, size in enumerate(sizes) if index not in placement.resident_units]
    staying = sum(sizes) - sum(moving)
    assert staying + sum(sorted(moving)[-2:]) <= placement.weights_bytes <= sum(sizes)
    if request.param_tier == "none":
        assert not moving
    comes_through_pages = not request.uses_host_memory and bool(placement.weights_on_nvme(len(units)))
    assert placement.num_upload_buffers >= (2 if comes_through_pages else 0)


def _require_gradients_fit(placement: Placement, units: list[UnitSize], request: Request) -> None:
    sizes = {
        index: unit.trainable_numel * request.gradient_itemsize
        for index, unit in enumerate(units)
        if unit.trainable_numel
    }
    widening = 1 if request.rounds_gradients else _FP32_BYTES // request.gradient_itemsize
    kept = sum(sizes[index] for index in placement.gradients_in_memory)
    assert kept + placement.gradient_scratch_bytes <= placement.gradient_bytes
    spilled = [size for index, size in sizes.items() if index not in placement.gradients_in_memory]
    assert placement.spills == bool(spilled)
    assert all(size * widening <= placement.gradient_scratch_bytes for size in spilled), "also as a sum"
    if kept * widening > placement.gradient_bytes:
        assert placement.gradient_scratch_bytes >= max(sizes.values()) * widening, "any of them may become a sum"
    one_by_one = request.updates_in_backward and request.num_micro_batches == 1
    if not request.can_spill and not one_by_one:
        assert not spilled, "there is no tier to spill to"
    assert placement.gradient_bytes >= max(sizes.values())


@pytest.mark.deep
@given(_questions(), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_parts_fit_into_the_budget(question: tuple[list[UnitSize], Request], generosity: float) -> None:
    units, request = question
    minimum = _minimum(units, request)
    roomy = 3 * minimum + 3 * sum(unit.weight_bytes + 16 * unit.trainable_numel for unit in units)
    request = dataclasses.replace(request, budget_bytes=minimum + int(generosity**3 * (roomy - minimum)))
    placement = place(units, request)
    assert placement.minimum_bytes == minimum
    _require_sound(placement, units, request)
    _require_gradients_fit(placement, units, request)


@pytest.mark.deep
@given(_questions())
@settings(max_examples=150, deadline=None)
def test_the_minimum_that_is_named_is_the_minimum(question: tuple[list[UnitSize], Request]) -> None:
    units, request = question
    minimum = _minimum(units, request)
    at_minimum = dataclasses.replace(request, budget_bytes=minimum)
    placement = place(units, at_minimum)
    _require_sound(placement, units, at_minimum)
    _require_gradients_fit(placement, units, at_minimum)
    assert _host_bytes(placement, at_minimum) == minimum, "all of the minimum is needed"
    with pytest.raises(BudgetTooSmallError) as caught:
        place(units, dataclasses.replace(request, budget_bytes=minimum - 1))
    assert caught.value.minimum_bytes == minimum
    assert str(minimum) in str(caught.value)


def _model(num_blocks: int = 4, granules: int = 1000) -> list[UnitSize]:
    numel = granules * CHUNK_GRANULE
    return [UnitSize(f"block {index}", 2 * numel, numel, 2, True) for index in range(num_blocks)]


def test_a_page_that_cannot_hold_one_chunk_is_refused_with_the_least() -> None:
    with pytest.raises(ConfigError, match=r"infinity\.staging_buffer_bytes") as caught:
        place(_model(), _request(staging_buffer_bytes=20_000))
    least = _FORMATS["bf16"].workspace_bytes(CHUNK_GRANULE, 2)
    assert str(least) in str(caught.value)
    place(_model(), _request(staging_buffer_bytes=least))


def test_the_map_of_a_durable_run_is_a_part_of_the_budget() -> None:
    units = _model()
    plain, durable = (place(units, _request(num_versions=number)) for number in (0, 3))
    stored = sum(unit.weight_bytes + _request().record_bytes(unit) for unit in units)
    most = _request(num_versions=3).map_bytes(units)
    assert durable.minimum_bytes - plain.minimum_bytes == most
    assert 0.99 * most < stored / 4096 * (4 + 5 * 3) < 1.01 * most
    with pytest.raises(BudgetTooSmallError, match="for the map of the durable run"):
        place(units, _request(num_versions=3, budget_bytes=plain.minimum_bytes))


def test_what_the_budget_is_needed_for_is_said() -> None:
    with pytest.raises(BudgetTooSmallError, match="offload_optimizer keeps in RAM"):
        place(_model(), _request(budget_bytes=1, param_tier="cpu", optimizer_tier="cpu", can_spill=False))
    with pytest.raises(BudgetTooSmallError, match="for staging buffers"):
        place(_model(), _request(budget_bytes=1))


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_the_least_device_memory_holds_the_two_largest_units(param_tier: str) -> None:
    units = [*_model(3), UnitSize("large", 9_000_000, 4_000_000 // CHUNK_GRANULE * CHUNK_GRANULE, 2, True)]
    two_largest = sum(sorted(unit.weight_bytes for unit in units)[-2:])
    staged = _request(uses_host_memory=False, param_tier=param_tier)
    for room in (two_largest, two_largest + 1):
        placement = place(units, dataclasses.replace(staged, device_budget_bytes=room))
        assert placement.weights_bytes == room
    with pytest.raises(BudgetTooSmallError) as caught:
        place(units, dataclasses.replace(staged, device_budget_bytes=two_largest - 1))
    assert caught.value.key == DEVICE_KEY
    assert caught.value.minimum_bytes == two_largest
    everything = place(units, dataclasses.replace(staged, device_budget_bytes=1 << 40)).weights_bytes
    assert everything == sum(unit.weight_bytes for unit in units)


def test_a_device_that_has_little_free_holds_fewer_weights() -> None:
    units = _model(num_blocks=8)
    largest = max(unit.weight_bytes for unit in units)
    total = sum(unit.weight_bytes for unit in units)
    others = 3 * largest + 4 * max(unit.trainable_numel for unit in units)
    staged = _request(uses_host_memory=False)
    roomy = place(units, dataclasses.replace(staged, device_free_bytes=others + 2 * total))
    assert roomy.weights_bytes == total
    tight = place(units, dataclasses.replace(staged, device_free_bytes=others + total))
    assert 2 * largest <= tight.weights_bytes <= 0.65 * total
    assert len(tight.resident_units) < len(roomy.resident_units)
    with pytest.raises(BudgetTooSmallError, match=r"free, of which gradients take .*offload_param") as caught:
        place(units, dataclasses.replace(staged, device_free_bytes=others + largest))
    assert caught.value.key == DEVICE_KEY
    # What the user says is taken: he may know that activations are small.
    assert place(units, dataclasses.replace(staged, device_free_bytes=others, device_budget_bytes=total)).weights_bytes


@pytest.mark.parametrize(
    ("form", "num_written"), [("bf16", 14), ("remainder", 12), ("bf16 states", 8), ("int8 states", 6 + 8 / 256)]
)
def test_what_the_main_job_moves(form: str, num_written: float) -> None:
    """bf16, AdamW, everything on NVMe, no room for weights beyond the least: per parameter of a model of many blocks."""
    units = _model(num_blocks=64)
    request = _request(record_format=_FORMATS[form])
    placement = place(units, dataclasses.replace(request, budget_bytes=_minimum(units, request)))
    order = [*range(64), *reversed(range(64))]
    prediction = predict(units, request, placement, order, 64)
    total = sum(unit.trainable_numel for unit in units)
    filling = _PAGE * sum(-(-unit.trainable_numel // placement.chunk_numel) for unit in units)
    filled = prediction.write_bytes - num_written * total
    assert filled == 0 if form != "int8 states" else 0 <= filled <= filling
    assert (num_written + 1.5) * total < prediction.read_bytes <= (num_written + 2) * total + filled


def _predicted(units: list[UnitSize], request: Request) -> tuple[int, int]:
    """Bytes read and written in a step through all units, forward and back; and what its chunks cost besides, as bytes."""
    order = [*range(len(units)), *reversed(range(len(units)))]
    placement = best_placement(units, request, order)
    prediction = predict(units, request, placement, order, len(units))
    return prediction.read_bytes + prediction.write_bytes, price_of_chunks(
        units, request, placement.chunk_numel, placement.states_in_memory
    )


def _all_there_is(units: list[UnitSize], request: Request) -> int:
    """More than weights, states, gradients and the largest staging together."""
    widest = max(unit.num_states for unit in units)
    numel = sum(unit.trainable_numel for unit in units)
    states = sum(unit.weight_bytes for unit in units) + request.record_format.record_bytes(numel, widest)
    return 2 * (states + 4 * numel) + (1 << 30)


@pytest.mark.deep
@given(_questions(), st.floats(0, 1), st.floats(0, 0.2))
@settings(max_examples=150, deadline=None)
def test_more_memory_never_moves_more(question: tuple[list[UnitSize], Request], one: float, step: float) -> None:
    units, request = question
    request = dataclasses.replace(request, prefetches=True)
    minimum = _minimum(units, request)
    room = sum(unit.weight_bytes + 20 * unit.trainable_numel for unit in units)
    budgets = [minimum + int(share * room) for share in (0.0, one**2, one**2 + step**3, 1.0)]
    moved = [_predicted(units, dataclasses.replace(request, budget_bytes=budget)) for budget in budgets]
    # The planner weighs what each use of memory saves by itself; a simulation of all of it may say a little else.
    # It may be worth it to move more in fewer chunks.
    for (before, chunks_before), (later, chunks_later) in itertools.pairwise(moved):
        assert later <= 1.01 * before + max(chunks_before - chunks_later, 0), moved


@pytest.mark.deep
@given(_questions())
@settings(max_examples=100, deadline=None)
def test_what_fits_wholly_moves_nothing(question: tuple[list[UnitSize], Request]) -> None:
    units, request = question
    request = dataclasses.replace(request, budget_bytes=_all_there_is(units, request))
    assert _predicted(units, request)[0] == 0
    placement = place(units, request)
    assert not placement.weights_on_nvme(len(units))
    assert not placement.spills


@given(_questions(), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_keeping_never_moves_more_than_not_keeping(question: tuple[list[UnitSize], Request], share: float) -> None:
    units, request = question
    request = dataclasses.replace(request, prefetches=True, uses_host_memory=True)
    minimum = _minimum(units, request)
    room = sum(unit.weight_bytes + 20 * unit.trainable_numel for unit in units)
    request = dataclasses.replace(request, budget_bytes=minimum + int(share**2 * room))
    assert _predicted(units, request)[0] <= _predicted(units, dataclasses.replace(request, keeps_in_memory=False))[0]


@pytest.mark.parametrize("num_micro_batches", [1, 8])
def test_pages_are_not_made_small_to_keep_a_little_more_in_memory(num_micro_batches: int) -> None:
    numels = [32_768_000, *[12_847_104] * 24, 32_768_000]
    numels = [-(-numel // CHUNK_GRANULE) * CHUNK_GRANULE for numel in numels]
    units = [UnitSize(f"unit {index}", 2 * numel, numel, 2, True) for index, numel in enumerate(numels)]
    request = _request(record_format=_FORMATS["remainder"], num_micro_batches=num_micro_batches)
    placement = place(units, dataclasses.replace(request, budget_bytes=_minimum(units, request) + 100_000_000))
    assert placement.num_staging_buffers * placement.staging_buffer_bytes >= 12_000_000
    assert placement.staging_buffer_bytes >= 1_500_000


def test_weights_come_first_then_gradients_then_states() -> None:
    units = _model(num_blocks=16)
    total = sum(unit.trainable_numel for unit in units)
    request = _request(record_format=_FORMATS["remainder"], update="deferred", num_micro_batches=3)
    seen = []
    for budget in range(_minimum(units, request), _minimum(units, request) + 18 * total, total // 4):
        placement = place(units, dataclasses.replace(request, budget_bytes=budget))
        kept = (len(placement.resident_units), len(placement.gradients_in_memory))
        seen.append((*kept, sum(placement.states_in_memory) / total))
    for num_resident, num_gradients, states in seen:
        # What is left when the next unit does not fit is all that the next kind gets before its time.
        assert num_gradients == 0 or num_resident >= 15
        assert states < 0.1 or num_gradients >= 15
    assert {16} <= {num_resident for num_resident, _, _ in seen}
    assert seen[-1] == (16, 16, 1.0)


@given(st.sampled_from([2, 4]), st.sampled_from(["none", "cpu", "nvme"]), st.integers(2, 8), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_divided_unit_has_room_to_be_put_together(num: int, tier: str, num_on_device: int, generosity: float) -> None:
    units = [
        dataclasses.replace(unit, shard_numel=unit.trainable_numel // num, weight_shard_bytes=unit.weight_bytes // num)
        for unit in _model(num_blocks=8)
    ]
    size = units[0].weight_bytes
    on_device = 8 if tier == "none" else num_on_device
    request = _request(uses_host_memory=False, param_tier=tier, device_budget_bytes=on_device * size)
    minimum = _minimum(units, request)
    request = dataclasses.replace(request, budget_bytes=minimum + int(generosity * 20 * size))
    placement = place(units, request)
    moving = frozenset(range(8)) - placement.resident_units
    assert len(placement.resident_units) == (8 if on_device == 8 else max(on_device - 3, 0))
    if moving:
        assert placement.num_upload_buffers == 2
        assert placement.upload_buffer_bytes >= size // num
        assert placement.hosted_units == moving if tier == "cpu" else placement.hosted_units <= moving
    else:
        assert placement.num_upload_buffers == 0
    states = sum(
        request.record_format.record_bytes(numel, unit.num_states)
        for numel, unit in zip(placement.states_in_memory, units, strict=True)
    )
    assert placement.kept_bytes == states + len(placement.hosted_units) * size // num
    assert _host_bytes(placement, request) <= request.budget_bytes


def _on_a_gpu(**changes: Any) -> Request:
    return _request(uses_host_memory=False, param_tier="none", optimizer_tier="none", can_spill=False, **changes)


def test_where_a_device_updates_chunks_are_large_and_there_are_no_pages() -> None:
    largest = 8192 * CHUNK_GRANULE
    for granules, chunk_numel in ((100, 100 * CHUNK_GRANULE), (20_000, largest)):
        placement = place(_model(2, granules), _on_a_gpu())
        assert (placement.chunk_numel, placement.num_staging_buffers) == (chunk_numel, 0)
    staging_buffer_bytes = 1 << 20
    asked = place(_model(2, 20_000), _on_a_gpu(staging_buffer_bytes=staging_buffer_bytes))
    assert (
        asked.staging_buffer_bytes
        <= staging_buffer_bytes
        < _FORMATS["bf16"].workspace_bytes(asked.chunk_numel + CHUNK_GRANULE, 2)
    )


def test_gradients_stay_on_a_device_that_has_room_for_them_beside_all_weights() -> None:
    units = _model()
    weights = sum(unit.weight_bytes for unit in units)
    gradients = sum(unit.trainable_numel * _FP32_BYTES for unit in units)
    roomy = place(units, _on_a_gpu())
    assert (roomy.gradients_on_device, roomy.gradient_bytes, roomy.landing_bytes) == (True, gradients, 0)
    assert not place(units, _on_a_gpu(is_alone=False)).gradients_on_device
    for room, is_enough in ((weights + gradients, True), (weights + gradients - 1, False)):
        placement = place(units, _on_a_gpu(device_budget_bytes=room))
        assert placement.gradients_on_device == is_enough
        assert (placement.host_bytes(_on_a_gpu()) > gradients) != is_enough
    frees = [place(units, _on_a_gpu(device_free_bytes=free << 20)) for free in range(155, 260, 5)]
    kept = [placement.gradients_on_device for placement in frees]
    assert kept == sorted(kept) and set(kept) == {False, True}, "from some size on"
    assert all(len(placement.resident_units) == len(units) for placement in frees)


def test_chunks_become_fewer_where_the_budget_has_room_for_larger_pages() -> None:
    units = _model(40, 50_000)
    small, large = (
        place(units, _request(uses_host_memory=False, budget_bytes=budget << 20, update_workers=8, update="deferred"))
        for budget in (2000, 8000)
    )
    assert large.chunk_numel >= 2 * small.chunk_numel
    assert large.staging_buffer_bytes * large.num_staging_buffers <= (8000 << 20) // 6
    tight = place(_model(40, 5000), _request(budget_bytes=500 << 20))
    assert tight.staging_buffer_bytes * tight.num_staging_buffers <= 48 << 20


def _units_of_8b() -> list[UnitSize]:
    block, embedding = (numel // CHUNK_GRANULE * CHUNK_GRANULE for numel in (218_112_000, 525_336_576))
    numels = [embedding, *[block] * 32, embedding]
    return [UnitSize(f"unit {index}", 2 * numel, numel, 2, True) for index, numel in enumerate(numels)]


@pytest.mark.parametrize("num_micro_batches", [1, 8])
def test_chunks_do_not_shrink_where_nearly_all_states_fit(num_micro_batches: int) -> None:
    """8B parameters beside a GPU: with 110 GB they had 10,232 chunks, and with 60 GB half as many."""
    units = _units_of_8b()
    found = []
    for gigabytes in range(60, 150, 2):
        request = _request(
            record_format=_FORMATS["remainder"],
            budget_bytes=gigabytes * 10**9,
            device_free_bytes=78 * 10**9,
            uses_host_memory=False,
            update="step",
            num_micro_batches=num_micro_batches,
            update_workers=4,
        )
        placement = best_placement(units, request, guessed_order(len(units)))
        found.append(sum(-(-unit.state_numel // placement.chunk_numel) for unit in units))
    assert max(found) <= 1.1 * found[0], found
