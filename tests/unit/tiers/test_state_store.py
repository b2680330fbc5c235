"""Records of optimizer state in working memory: leased without waiting if that is asked, and returned in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.tiers.state_store import Lease, PagedStateStore, StateStore
from infinity.units.layout import CHUNK_GRANULE, Chunk
from infinity.units.unit import Unit
from swapper import StagingPool, Swapper
from tests.unit.stage import trainable_unit
from tests.waiting import wait_until

_NAMES = ("exp_avg", "exp_avg_sq")
_BF16 = ChunkFormat(torch.bfloat16, MainWeight.FP32)


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 20) as opened:
        yield opened


def _staging_pool(num_staging_buffers: int, form: ChunkFormat, num_states: int = 2) -> StagingPool:
    num_bytes = form.workspace_bytes(CHUNK_GRANULE, num_states)
    return StagingPool(-(-num_bytes // 4096) * 4096, num_staging_buffers, deadline_seconds=10)


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
    staging_pool = _staging_pool(1, _BF16)
    records = PagedStateStore(swapper, staging_pool, _BF16)
    records.allocate(unit, chunks, _NAMES)
    lease = _open(records, unit, chunks[0])
    assert records.open(unit, chunks[1], is_blocking=False) is None
    assert staging_pool.statistics().owners == (("optimizer state of unit 0", 1),)
    lease.discard()
    second = records.open(unit, chunks[1], is_blocking=False)
    assert second is not None
    second.discard()
    assert staging_pool.statistics().num_leased == 0


def test_a_page_is_free_when_all_writes_from_it_are_done(swapper: Swapper) -> None:
    unit, chunks = _unit(torch.bfloat16)
    staging_pool = _staging_pool(2, _BF16)
    records = PagedStateStore(swapper, staging_pool, _BF16)
    records.allocate(unit, chunks, _NAMES)
    extent = swapper.allocate(2 * CHUNK_GRANULE, "weights")
    lease = _open(records, unit, chunks[0])
    lease.workspace.weight.fill_(2)
    lease.write_back([swapper.write(extent, lease.workspace.weight)])
    swapper.flush()
    wait_until(lambda: not staging_pool.statistics().num_leased)  # callbacks may run a moment after the flush
    assert staging_pool.statistics().num_leased == 0
    with _staging_pool(1, _BF16).lease() as staging_buffer:
        weights = staging_buffer.tensor[: 2 * CHUNK_GRANULE].view(torch.bfloat16)
        swapper.read(extent, weights).wait()
        assert torch.equal(weights, torch.full_like(weights, 2))
