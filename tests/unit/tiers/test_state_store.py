"""Optimizer state in working memory: laid out as stored, read back as written, its pages returned in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.tiers.state_store import Lease, PagedStateStore, ResidentStateStore, StateStore
from infinity.units.layout import CHUNK_GRANULE, Chunk
from infinity.units.unit import Unit
from swapper import StagingArena, Swapper
from tests.unit.stage import trainable_unit
from tests.waiting import wait_until

_NAMES = ("exp_avg", "exp_avg_sq")
_FP32 = ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT)
_BF16 = ChunkFormat(torch.bfloat16, MainWeight.FP32)
_HALVES = ChunkFormat(torch.bfloat16, MainWeight.REMAINDER)
_SMALL = [
    ChunkFormat(dtype, main, states)
    for states in (StateFormat.BF16, StateFormat.INT8)
    for dtype, main in ((torch.float32, MainWeight.MODEL_WEIGHT), (torch.bfloat16, MainWeight.REMAINDER))
]
_FORMATS = [
    *(pytest.param(form, id=name) for form, name in ((_FP32, "fp32"), (_BF16, "bf16"), (_HALVES, "remainder"))),
    *(pytest.param(form, id=f"{form.main.name.lower()}-{form.states.value}_states") for form in _SMALL),
]


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 20) as opened:
        yield opened


def _arena(num_pages: int, form: ChunkFormat, num_states: int = 2) -> StagingArena:
    num_bytes = form.workspace_bytes(CHUNK_GRANULE, num_states)
    return StagingArena(-(-num_bytes // 4096) * 4096, num_pages, deadline_seconds=10)


def _unit(dtype: torch.dtype) -> tuple[Unit, tuple[Chunk, ...]]:
    unit = trainable_unit(0, [(3000,), (50, 7)], dtype)
    return unit, unit.layout.chunks(CHUNK_GRANULE)


def _open(records: StateStore, unit: Unit, chunk: Chunk) -> Lease:
    lease = records.open(unit, chunk, is_blocking=True)
    assert lease is not None
    lease.wait()
    return lease


@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize("num_states", [0, 1, 3])
def test_the_working_memory_has_no_overlaps(form: ChunkFormat, num_states: int) -> None:
    numel = CHUNK_GRANULE
    total = form.workspace_bytes(numel, num_states)
    memory = torch.zeros(total, dtype=torch.uint8)
    names = [f"state{index}" for index in range(num_states)]
    workspace = form.lay_out(memory, numel, names)
    assert list(workspace.states) == names
    for state in workspace.states.values():
        assert (state.dtype, state.nbytes) == (form.states.dtype, form.states.num_bytes(numel))
    parts = [workspace.gradient, workspace.weight]
    assert workspace.weight.dtype == form.weight_dtype
    if form.main is MainWeight.MODEL_WEIGHT:
        assert workspace.weight is workspace.main
    elif workspace.main is not None:
        parts.append(workspace.main)
    if form.main is MainWeight.REMAINDER:
        assert workspace.main is None
        assert workspace.remainder is not None
        parts.append(workspace.remainder)
    assert all(part.shape == (numel,) for part in parts)
    for part in [*parts, *workspace.states.values()]:
        part.view(torch.uint8).add_(1)
    workspace.record[form.record_bytes(numel, num_states) :].add_(1)
    assert torch.equal(memory, torch.ones_like(memory)), "each byte belongs to one part"
    assert workspace.record.numel() == form.stored_bytes(numel, num_states)
    assert workspace.needs_weight == form.needs_weight == (form.main is not MainWeight.FP32)


@pytest.mark.parametrize("form", _FORMATS)
def test_the_record_is_the_state_and_not_the_scratch(form: ChunkFormat) -> None:
    memory = torch.zeros(form.workspace_bytes(CHUNK_GRANULE, 2), dtype=torch.uint8)
    workspace = form.lay_out(memory, CHUNK_GRANULE, _NAMES)
    workspace.record.fill_(1)
    assert not workspace.gradient.view(torch.uint8).any()
    assert all(bool((state.view(torch.uint8) == 1).all()) for state in workspace.states.values())
    # Where the model weight is a part of the main weight, it is stored with the weights.
    assert not workspace.weight.view(torch.uint8).any()
    for part in (workspace.main, workspace.remainder):
        if part is not None and part is not workspace.weight:
            assert bool((part.view(torch.uint8) == 1).all())


@pytest.mark.parametrize("form", _FORMATS)
def test_main_weights_are_read_as_written(form: ChunkFormat) -> None:
    workspace = form.lay_out(
        torch.zeros(form.workspace_bytes(CHUNK_GRANULE, 1), dtype=torch.uint8), CHUNK_GRANULE, ["a"]
    )
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    workspace.write_main(slice(64, 164), values)
    found = torch.empty(100)
    workspace.read_main(slice(64, 164), found)
    assert torch.equal(found, values)
    workspace.read_main(slice(0, 100), found)
    assert not found[:64].any()
    workspace.cast_main()
    expected = values.to(form.weight_dtype)
    assert torch.equal(workspace.weight[64:164], expected), "none of these is a tie"


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (_FP32, torch.float32),
        *((form, dtype) for form in (_BF16, _HALVES) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_gradients_land_where_nothing_else_is(form: ChunkFormat, dtype: torch.dtype) -> None:
    workspace = form.lay_out(
        torch.zeros(form.workspace_bytes(CHUNK_GRANULE, 2), dtype=torch.uint8), CHUNK_GRANULE, _NAMES
    )
    landing = workspace.landing(dtype)
    assert (landing.dtype, landing.shape) == (dtype, (CHUNK_GRANULE,))
    landing.view(torch.uint8).fill_(1)
    assert not workspace.record.any()
    if workspace.needs_weight:
        assert not workspace.weight.view(torch.uint8).any()


@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize("kind", ["paged", "resident"])
def test_what_was_written_back_comes_again(swapper: Swapper, form: ChunkFormat, kind: str) -> None:
    unit, chunks = _unit(form.weight_dtype)
    records: StateStore
    records = (
        PagedStateStore(swapper, _arena(2, form), form)
        if kind == "paged"
        else ResidentStateStore(torch.device("cpu"), form)
    )
    records.allocate(unit, chunks, _NAMES)
    assert records.names_of(unit) == _NAMES
    for chunk in chunks:
        lease = _open(records, unit, chunk)
        assert not any(state.any() for state in lease.workspace.states.values()), "a fresh record is zero"
        for number, state in enumerate(lease.workspace.states.values()):
            state.fill_(10 * chunk.index + number)
        _main_of(lease).fill_(100 + chunk.index)
        lease.write_back([])
    for chunk in reversed(chunks):
        lease = _open(records, unit, chunk)
        for number, state in enumerate(lease.workspace.states.values()):
            assert torch.equal(state, torch.full_like(state, 10 * chunk.index + number))
        if form.main is not MainWeight.MODEL_WEIGHT:
            main = _main_of(lease)
            assert torch.equal(main, torch.full_like(main, 100 + chunk.index))


def _main_of(lease: Lease) -> torch.Tensor:
    """What comes before the states."""
    main = lease.workspace.remainder if lease.workspace.main is None else lease.workspace.main
    assert main is not None
    return main


@pytest.mark.parametrize(("form", "num_bytes"), [(_BF16, 4), (_HALVES, 2)], ids=["bf16", "remainder"])
def test_the_main_weight_alone_leaves_states_of_zero(swapper: Swapper, form: ChunkFormat, num_bytes: int) -> None:
    unit, chunks = _unit(torch.bfloat16)
    records = PagedStateStore(swapper, _arena(1, form), form)
    records.allocate(unit, chunks, _NAMES)
    lease = _open(records, unit, chunks[0])
    _main_of(lease).fill_(5)
    lease.workspace.states["exp_avg"].fill_(9)  # what an earlier user of the page left
    lease.write_back([], main_only=True)
    before = swapper.statistics().read_bytes
    lease = _open(records, unit, chunks[0])
    assert torch.equal(_main_of(lease), torch.full_like(_main_of(lease), 5))
    assert not any(state.any() for state in lease.workspace.states.values())
    assert swapper.statistics().read_bytes - before == num_bytes * CHUNK_GRANULE, "zeros are not read"


@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize("num_states", [0, 1, 2])
def test_records_on_a_drive_fill_blocks(form: ChunkFormat, num_states: int) -> None:
    for num_granules in (1, 2, 31, 500):
        numel = num_granules * CHUNK_GRANULE
        in_memory, stored = form.record_bytes(numel, num_states), form.stored_bytes(numel, num_states)
        assert stored % 4096 == 0
        assert 0 <= stored - in_memory < (4096 if form.states is StateFormat.INT8 and num_states else 1)
        chunks = [min(7 * CHUNK_GRANULE, numel - start) for start in range(0, numel, 7 * CHUNK_GRANULE)]
        one_by_one = sum(form.stored_bytes(chunk, num_states) for chunk in chunks)
        assert form.stored_bytes(numel, num_states, 7 * CHUNK_GRANULE) == one_by_one
        room = form.workspace_bytes(numel, num_states)
        assert form.numel_in(room, num_states, CHUNK_GRANULE) == numel
        assert form.numel_in(room - 1, num_states, CHUNK_GRANULE) == numel - CHUNK_GRANULE


def test_no_page_is_said_and_not_waited_for(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    arena = _arena(1, _BF16)
    records = PagedStateStore(swapper, arena, _BF16)
    records.allocate(unit, chunks, _NAMES)
    lease = _open(records, unit, chunks[0])
    assert records.open(unit, chunks[1], is_blocking=False) is None
    assert arena.statistics().owners == (("optimizer state of unit 0", 1),)
    lease.discard()
    second = records.open(unit, chunks[1], is_blocking=False)
    assert second is not None
    second.discard()
    assert arena.statistics().num_leased == 0


def test_a_page_is_free_when_all_writes_from_it_are_done(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    arena = _arena(2, _BF16)
    records = PagedStateStore(swapper, arena, _BF16)
    records.allocate(unit, chunks, _NAMES)
    extent = swapper.allocate(2 * CHUNK_GRANULE, "weights")
    lease = _open(records, unit, chunks[0])
    lease.workspace.weight.fill_(2)
    lease.write_back([swapper.write(extent, lease.workspace.weight)])
    swapper.flush()
    wait_until(lambda: not arena.statistics().num_leased)  # callbacks may run a moment after the flush
    assert arena.statistics().num_leased == 0
    with _arena(1, _BF16).lease() as page:
        weights = page.tensor[: 2 * CHUNK_GRANULE].view(torch.bfloat16)
        swapper.read(extent, weights).wait()
        assert torch.equal(weights, torch.full_like(weights, 2))


def test_a_unit_without_states_in_fp32_has_nothing_to_store(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.float32)
    records = PagedStateStore(swapper, _arena(1, _FP32, 0), _FP32)
    free = swapper.free_bytes
    records.allocate(unit, chunks, ())
    assert swapper.free_bytes == free
    lease = _open(records, unit, chunks[0])
    lease.write_back([])
    _open(records, unit, chunks[1]).discard()


@pytest.mark.parametrize("form", _FORMATS)
def test_records_in_memory_are_worked_on_in_place(swapper: Swapper, form: ChunkFormat) -> None:
    unit, chunks = _unit(form.weight_dtype)
    assert len(chunks) == 2
    arena = _arena(1, form)
    records = PagedStateStore(swapper, arena, form)
    records.allocate(unit, chunks, _NAMES, numel_in_memory=CHUNK_GRANULE)
    weight = torch.zeros(chunks[0].numel, dtype=form.weight_dtype)
    before = swapper.statistics()
    for value in (0, 7):
        lease = records.open(unit, chunks[0], is_blocking=False, weight=weight, needs_scratch=False)
        assert lease is not None
        assert arena.statistics().num_leased == 0, "there is nothing to put into a page"
        workspace = lease.workspace
        assert workspace.weight.data_ptr() == weight.data_ptr()
        assert torch.equal(workspace.states["exp_avg"], torch.full_like(workspace.states["exp_avg"], value))
        workspace.states["exp_avg"].fill_(7)
        lease.write_back([])
    lease = _open(records, unit, chunks[0])
    assert arena.statistics().num_leased == 1, "for the weight and the gradient"
    assert torch.equal(lease.workspace.states["exp_avg"], torch.full_like(lease.workspace.states["exp_avg"], 7))
    lease.workspace.gradient.fill_(1)
    lease.workspace.weight.fill_(1)
    lease.write_back([])
    assert arena.statistics().num_leased == 0
    assert swapper.statistics() == before, "no drive was asked"
    lease = _open(records, unit, chunks[1])
    lease.workspace.states["exp_avg"].fill_(3)
    num_bytes = lease.workspace.record.numel()
    lease.write_back([])
    swapper.flush()
    assert swapper.statistics().write_bytes - before.write_bytes == num_bytes


def test_a_page_with_scratch_for_memory_is_free_when_all_writes_from_it_are_done(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    arena = _arena(1, _HALVES)
    records = PagedStateStore(None, arena, _HALVES)
    records.allocate(unit, chunks, _NAMES, numel_in_memory=unit.layout.trainable_numel)
    extent = swapper.allocate(2 * CHUNK_GRANULE, "weights")
    lease = _open(records, unit, chunks[0])
    lease.write_back([swapper.write(extent, lease.workspace.weight)])
    swapper.flush()
    wait_until(lambda: not arena.statistics().num_leased)
    assert arena.statistics().num_leased == 0


def test_records_that_rest_nowhere_are_refused() -> None:
    unit, chunks = _unit(torch.bfloat16)
    records = PagedStateStore(None, _arena(1, _HALVES), _HALVES)
    with pytest.raises(RuntimeError, match="rest nowhere"):
        records.allocate(unit, chunks, _NAMES, numel_in_memory=CHUNK_GRANULE)
