"""Records that are read before they are opened: what comes is what is stored, and nobody waits for a staging buffer that nobody
opens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.tiers.state_store import Lease, PagedStateStore
from infinity.units.layout import CHUNK_GRANULE, Chunk
from infinity.units.unit import Unit
from swapper import StagingPool, Swapper
from tests.unit.stage import trainable_unit
from tests.waiting import wait_until

_FORMATS = {
    "fp32": ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT),
    "bf16": ChunkFormat(torch.bfloat16, MainWeight.FP32),
    "remainder": ChunkFormat(torch.bfloat16, MainWeight.REMAINDER),
}
_NUM_CHUNKS = 4


class _Store:
    """Records of one unit, each with the number of its chunk in its state."""

    def __init__(self, swapper: Swapper, form: ChunkFormat, num_staging_buffers: int) -> None:
        self.swapper = swapper
        self.staging_pool = StagingPool(
            form.workspace_bytes(CHUNK_GRANULE, 1), num_staging_buffers, deadline_seconds=10
        )
        self.records = PagedStateStore(swapper, self.staging_pool, form)
        self.unit: Unit = trainable_unit(0, [(_NUM_CHUNKS * CHUNK_GRANULE,)], form.weight_dtype)
        self.chunks: tuple[Chunk, ...] = self.unit.layout.chunks(CHUNK_GRANULE)
        self.records.allocate(self.unit, self.chunks, ("a",))
        for chunk in self.chunks:
            self.change(chunk, float(chunk.index + 1))

    def open(self, chunk: Chunk, weight: torch.Tensor | None = None, *, reads: bool = True) -> Lease:
        lease = self.records.open(self.unit, chunk, is_blocking=True, weight=weight, reads=reads)
        lease.wait()
        return lease

    def change(self, chunk: Chunk, value: float) -> None:
        lease = self.open(chunk)
        lease.workspace.states["a"].fill_(value)
        lease.write_back([])
        self.swapper.flush()

    def value(self, chunk: Chunk, weight: torch.Tensor | None = None, *, reads: bool = True) -> set[float]:
        lease = self.open(chunk, weight, reads=reads)
        found = set(lease.workspace.states["a"].tolist())
        lease.discard()
        return found

    def read_ahead(self, chunk: Chunk) -> bool:
        return self.records.read_ahead(self.unit, chunk)

    @property
    def num_leased(self) -> int:
        return self.staging_pool.num_leased

    @property
    def read_bytes(self) -> int:
        return self.swapper.statistics().read_bytes


@contextmanager
def _opened(form: ChunkFormat, num_staging_buffers: int) -> Iterator[_Store]:
    with Swapper.in_memory(1 << 20) as swapper:
        store = _Store(swapper, form, num_staging_buffers)
        yield store
        store.records.drop_read_ahead()
        store.staging_pool.close()


@pytest.fixture(params=_FORMATS)
def store(request: pytest.FixtureRequest) -> Iterator[_Store]:
    with _opened(_FORMATS[request.param], num_staging_buffers=6) as opened:
        yield opened


@pytest.mark.parametrize("is_in_place", [False, True])
def test_it_is_read_once(store: _Store, is_in_place: bool) -> None:
    """Wherever the weights lie by the time it is opened."""
    chunk, before = store.chunks[1], store.read_bytes
    assert store.read_ahead(chunk)
    assert store.read_ahead(chunk), "there is nothing left to do"
    wait_until(lambda: store.read_bytes > before)
    read_bytes = store.read_bytes - before
    weight = torch.zeros(chunk.numel, dtype=_weight_dtype(store)) if is_in_place else None
    assert store.value(chunk, weight) == {2.0}
    assert store.read_bytes - before == read_bytes


def _weight_dtype(store: _Store) -> torch.dtype:
    return store.unit.layout.slots[0].spec.dtype


def test_it_is_what_was_stored_last(store: _Store) -> None:
    chunk = store.chunks[0]
    assert store.read_ahead(chunk)
    store.change(chunk, 7.0)
    assert store.value(chunk) == {7.0}
    lease = store.open(chunk)
    assert not store.read_ahead(chunk), "somebody is about to change it"
    lease.workspace.states["a"].fill_(8.0)
    lease.write_back([])
    assert store.read_ahead(chunk)
    assert store.value(chunk) == {8.0}
    store.open(chunk).discard()
    assert store.read_ahead(chunk), "nobody has changed it"


def test_a_lease_that_has_ended_may_be_discarded(store: _Store) -> None:
    first, second = store.chunks[:2]
    stored = store.open(first)
    stored.write_back([])
    stored.discard()
    discarded = store.open(first)
    discarded.discard()
    again = store.open(first)
    discarded.discard()
    assert not store.read_ahead(first), "the lease that came later is still open"
    again.discard()
    store.swapper.flush()
    assert store.num_leased == 0 and store.value(second) == {2.0}


def test_three_pages_are_left_for_others() -> None:
    with _opened(_FORMATS["bf16"], num_staging_buffers=5) as store:
        assert [store.read_ahead(chunk) for chunk in store.chunks] == [True, True, False, False]
        assert store.num_leased == 2
    with _opened(_FORMATS["bf16"], num_staging_buffers=3) as store:
        assert not store.read_ahead(store.chunks[0])


def test_who_needs_a_page_gets_one_that_was_read_ahead_into() -> None:
    """And what was in it is read again by whoever opens that."""
    with _opened(_FORMATS["bf16"], num_staging_buffers=4) as store:
        others = [store.staging_pool.lease(owner="somebody") for _ in range(3)]
        assert store.read_ahead(store.chunks[0])
        assert store.records.open(store.unit, store.chunks[1], is_blocking=False) is None, "it waits while it can"
        assert store.value(store.chunks[1]) == {2.0}
        assert store.value(store.chunks[0]) == {1.0}
        for staging_buffer in others:
            staging_buffer.release()


def test_who_waits_for_a_page_that_is_being_written_takes_none_that_was_read_ahead_into() -> None:
    with _opened(_FORMATS["bf16"], num_staging_buffers=4) as store:
        others = [store.staging_pool.lease(owner="somebody") for _ in range(3)]
        assert store.read_ahead(store.chunks[0])
        writer = threading.Timer(0.1, others[0].release)
        writer.start()
        assert store.value(store.chunks[1]) == {2.0}
        writer.join()
        before = store.read_bytes
        assert store.value(store.chunks[0]) == {1.0}
        assert store.read_bytes == before, "it was read again"
        for staging_buffer in others[1:]:
            staging_buffer.release()


def test_whoever_changes_records_while_they_are_read_ahead_sees_no_old_ones() -> None:
    """Many times, with one thread that reads ahead as fast as it can."""
    is_over = threading.Event()
    with _opened(_FORMATS["bf16"], num_staging_buffers=6) as store:

        def read_ahead() -> None:
            while not is_over.is_set():
                for chunk in store.chunks:
                    store.read_ahead(chunk)

        thread = threading.Thread(target=read_ahead)
        thread.start()
        try:
            for number in range(200):
                for chunk in store.chunks:
                    lease = store.open(chunk)
                    assert lease.workspace.states["a"][0] == (number + 10 if number else chunk.index + 1)
                    lease.workspace.states["a"].fill_(number + 11)
                    lease.write_back([])
        finally:
            is_over.set()
            thread.join()
