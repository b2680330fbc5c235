"""Pages of optimizer state in working memory: lent without waiting if that is asked, and returned in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.tiers.state_store import Lease, PagedStateStore, StateStore
from infinity.units.layout import CHUNK_GRANULE, Chunk
from infinity.units.unit import Unit
from swapper import StagingArena, Swapper
from tests.unit.stage import trainable_unit
from tests.waiting import wait_until

_NAMES = ("exp_avg", "exp_avg_sq")
_BF16 = ChunkFormat(torch.bfloat16, MainWeight.FP32)


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
