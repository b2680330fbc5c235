"""Optimizer state in working memory: laid out as stored, read back as written, its pages returned in time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from infinity.layout import CHUNK_GRANULE, Chunk
from infinity.records import (
    Lease,
    PagedRecords,
    RecordStore,
    ResidentRecords,
    lay_out,
    record_bytes,
    workspace_bytes,
)
from infinity.unit import Unit
from swapper import StagingArena, Swapper
from tests.unit.core.stage import trainable_unit

_NAMES = ("exp_avg", "exp_avg_sq")
_DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 20) as opened:
        yield opened


def _arena(num_pages: int, dtype: torch.dtype, num_states: int = 2) -> StagingArena:
    num_bytes = workspace_bytes(CHUNK_GRANULE, num_states, dtype.itemsize)
    return StagingArena(-(-num_bytes // 4096) * 4096, num_pages, deadline_seconds=10)


def _unit(dtype: torch.dtype) -> tuple[Unit, tuple[Chunk, ...]]:
    unit = trainable_unit(0, [(3000,), (50, 7)], dtype)
    return unit, unit.layout.chunks(CHUNK_GRANULE)


def _open(records: RecordStore, unit: Unit, chunk: Chunk) -> Lease:
    lease = records.open(unit, chunk, is_blocking=True)
    assert lease is not None
    lease.wait()
    return lease


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("num_states", [0, 1, 3])
def test_the_working_memory_has_no_overlaps(dtype: torch.dtype, num_states: int) -> None:
    numel = CHUNK_GRANULE
    total = workspace_bytes(numel, num_states, dtype.itemsize)
    memory = torch.zeros(total, dtype=torch.uint8)
    names = [f"state{index}" for index in range(num_states)]
    workspace = lay_out(memory, numel, names, dtype)
    assert list(workspace.states) == names
    parts = [workspace.main, *workspace.states.values(), workspace.gradient]
    if dtype != torch.float32:
        parts.append(workspace.weight)
        assert workspace.weight.dtype == dtype
    else:
        assert workspace.weight is workspace.main
    for part in parts:
        assert part.shape == (numel,)
        part.view(torch.uint8).add_(1)
    assert torch.equal(memory, torch.ones_like(memory)), "each byte belongs to one part"
    assert workspace.record.numel() == record_bytes(numel, num_states, dtype.itemsize)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_record_is_the_state_and_not_the_scratch(dtype: torch.dtype) -> None:
    memory = torch.zeros(workspace_bytes(CHUNK_GRANULE, 2, dtype.itemsize), dtype=torch.uint8)
    workspace = lay_out(memory, CHUNK_GRANULE, _NAMES, dtype)
    workspace.record.fill_(1)
    assert not workspace.gradient.view(torch.uint8).any()
    assert all(bool((state.view(torch.uint8) == 1).all()) for state in workspace.states.values())
    # With fp32 compute the main weight is the model weight, and is stored with the weights.
    assert bool((workspace.main.view(torch.uint8) == 1).all()) == (dtype != torch.float32)
    if dtype != torch.float32:
        assert not workspace.weight.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", ["paged", "resident"])
def test_what_was_written_back_comes_again(swapper: Swapper, dtype: torch.dtype, kind: str) -> None:
    unit, chunks = _unit(dtype)
    records: RecordStore
    records = (
        PagedRecords(swapper, _arena(2, dtype), dtype)
        if kind == "paged"
        else ResidentRecords(torch.device("cpu"), dtype)
    )
    records.allocate(unit, chunks, _NAMES)
    assert records.names_of(unit) == _NAMES
    for chunk in chunks:
        lease = _open(records, unit, chunk)
        assert not any(state.any() for state in lease.workspace.states.values()), "a fresh record is zero"
        for number, state in enumerate(lease.workspace.states.values()):
            state.fill_(10 * chunk.index + number)
        lease.workspace.main.fill_(100 + chunk.index)
        lease.write_back([])
    for chunk in reversed(chunks):
        workspace = _open(records, unit, chunk).workspace
        for number, state in enumerate(workspace.states.values()):
            assert torch.equal(state, torch.full_like(state, 10 * chunk.index + number))
        if dtype != torch.float32:
            assert torch.equal(workspace.main, torch.full_like(workspace.main, 100 + chunk.index))


def test_the_main_weight_alone_leaves_states_of_zero(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    records = PagedRecords(swapper, _arena(1, torch.bfloat16), torch.bfloat16)
    records.allocate(unit, chunks, _NAMES)
    lease = _open(records, unit, chunks[0])
    lease.workspace.main.fill_(5)
    lease.workspace.states["exp_avg"].fill_(9)  # what an earlier user of the page left
    lease.write_back([], main_only=True)
    before = swapper.statistics().read_bytes
    workspace = _open(records, unit, chunks[0]).workspace
    assert torch.equal(workspace.main, torch.full_like(workspace.main, 5))
    assert not any(state.any() for state in workspace.states.values())
    assert swapper.statistics().read_bytes - before == 4 * CHUNK_GRANULE, "zeros are not read"


def test_no_page_is_said_and_not_waited_for(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    arena = _arena(1, torch.bfloat16)
    records = PagedRecords(swapper, arena, torch.bfloat16)
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
    arena = _arena(2, torch.bfloat16)
    records = PagedRecords(swapper, arena, torch.bfloat16)
    records.allocate(unit, chunks, _NAMES)
    extent = swapper.allocate(2 * CHUNK_GRANULE, "weights")
    lease = _open(records, unit, chunks[0])
    lease.workspace.weight.fill_(2)
    lease.write_back([swapper.write(extent, lease.workspace.weight)])
    swapper.flush()
    deadline = time.monotonic() + 10
    while arena.statistics().num_leased and time.monotonic() < deadline:
        time.sleep(0.001)  # callbacks may run a moment after the flush
    assert arena.statistics().num_leased == 0
    with _arena(1, torch.bfloat16).lease() as page:
        weights = page.tensor[: 2 * CHUNK_GRANULE].view(torch.bfloat16)
        swapper.read(extent, weights).wait()
        assert torch.equal(weights, torch.full_like(weights, 2))


def test_a_unit_without_states_in_fp32_has_nothing_to_store(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.float32)
    records = PagedRecords(swapper, _arena(1, torch.float32, 0), torch.float32)
    free = swapper.free_bytes
    records.allocate(unit, chunks, ())
    assert swapper.free_bytes == free
    lease = _open(records, unit, chunks[0])
    lease.write_back([])
    _open(records, unit, chunks[1]).discard()
