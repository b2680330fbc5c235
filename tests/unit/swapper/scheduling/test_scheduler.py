"""Which request goes first, which ones run side by side, and how they are cut. Nothing here depends on time."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from swapper import ALIGNMENT, Extent, Handle, Priority, Swapper, SwapperConfig
from swapper.backend import Direction
from swapper.backends.memory import MemoryBackend
from swapper.errors import StallError, SwapperError
from swapper.scheduling.waiting import TICKS_PER_DEADLINE
from tests.manual_backend import ManualBackend

pytestmark = pytest.mark.off_main_thread

_BLOCK = ALIGNMENT


@contextmanager
def _opened(
    num_blocks: int, backend: ManualBackend | None = None, **settings: int
) -> Iterator[tuple[Swapper, ManualBackend, Extent]]:
    """A swapper, and an extent whose bytes are all written; the backend's log starts behind that."""
    backend = backend or ManualBackend(256 * _BLOCK)
    with Swapper(backend, SwapperConfig(**settings)) as swapper:  # type: ignore[arg-type]
        extent = swapper.allocate(num_blocks * _BLOCK, "x")
        swapper.write(extent, np.zeros(num_blocks * _BLOCK, dtype=np.uint8))
        backend.complete_all()
        backend.submitted.clear()
        backend.log.clear()
        yield swapper, backend, extent
        backend.complete_all()
        swapper.flush()


def _read(swapper: Swapper, extent: Extent, block: int = 0, num_blocks: int = 1, priority: int = 0) -> Handle:
    memory = np.empty(num_blocks * _BLOCK, dtype=np.uint8)
    return swapper.read(extent, memory, offset=block * _BLOCK, priority=Priority(priority))


def _write(swapper: Swapper, extent: Extent, block: int = 0, num_blocks: int = 1, priority: int = 2) -> Handle:
    memory = np.full(num_blocks * _BLOCK, 7, dtype=np.uint8)
    return swapper.write(extent, memory, offset=block * _BLOCK, priority=Priority(priority))


def test_long_requests_are_cut_and_end_with_their_last_piece() -> None:
    with _opened(5, request_bytes=2 * _BLOCK) as (swapper, backend, extent):
        handle = _read(swapper, extent, num_blocks=5)
        assert backend.log == [("read", 0, 2 * _BLOCK), ("read", 2 * _BLOCK, 2 * _BLOCK), ("read", 4 * _BLOCK, _BLOCK)]
        for index in (2, 0):
            backend.complete(index)
            assert not handle.done()
        backend.complete()
        assert handle.done()


def test_pieces_never_cross_a_boundary_and_only_ends_are_unaligned() -> None:
    backend = ManualBackend(64 * _BLOCK, block_bytes=_BLOCK, boundary_bytes=4 * _BLOCK)
    with _opened(16, backend, request_bytes=8 * _BLOCK) as (swapper, _, extent):
        swapper.read(extent, np.empty(9 * _BLOCK, dtype=np.uint8), offset=100)
        pieces = [(offset, offset + length) for _, offset, length in backend.log]
        assert pieces[0][0] == 100 and pieces[-1][1] == 9 * _BLOCK + 100
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
        assert all(stop % _BLOCK == 0 for _, stop in pieces[:-1])
        assert all(start // (4 * _BLOCK) == (stop - 1) // (4 * _BLOCK) for start, stop in pieces)


def test_in_flight_is_bounded_for_each_direction() -> None:
    with _opened(32, max_inflight=3) as (swapper, backend, extent):
        for block in range(10):
            _read(swapper, extent, block)
            _write(swapper, extent, 16 + block)
            assert backend.inflight(Direction.READ) == backend.inflight(Direction.WRITE) == min(3, block + 1)
        statistics = swapper.statistics()
        assert (statistics.inflight_reads, statistics.inflight_writes, statistics.inflight) == (3, 3, 6)
        assert (statistics.queued_reads, statistics.queued_writes, statistics.queued) == (7, 7, 14)
        backend.complete()
        assert backend.inflight(Direction.READ) == 3
    assert backend.log[:6].count(("read", 0, _BLOCK)) == 1


def test_demand_before_prefetch_before_write_back() -> None:
    with _opened(8, max_inflight=1) as (swapper, backend, extent):
        _read(swapper, extent, 0)  # occupies the only place
        _read(swapper, extent, 1, priority=Priority.WRITE_BACK)
        _read(swapper, extent, 2, priority=Priority.PREFETCH)
        _read(swapper, extent, 3, priority=Priority.DEMAND)
        _read(swapper, extent, 4, priority=Priority.PREFETCH)
        backend.complete_all()
        assert [offset // _BLOCK for _, offset, _ in backend.log] == [0, 3, 2, 4, 1]


def test_a_waiting_request_is_overtaken_only_so_often() -> None:
    with _opened(128, max_inflight=1, max_overtakes=5) as (swapper, backend, extent):
        for block in range(100):
            _write(swapper, extent, block, priority=Priority.DEMAND)
            if block == 0:
                _write(swapper, extent, 101, priority=Priority.WRITE_BACK)
                _write(swapper, extent, 102, priority=Priority.PREFETCH)
        backend.complete_all()
        order = [offset // _BLOCK for _, offset, _ in backend.log]
        assert sorted(order) == [*range(100), 101, 102]
        assert order.index(102) <= 1 + 5 + 1
        assert order.index(101) <= 1 + 5 + 2


def test_a_long_request_of_low_priority_is_overtaken_between_its_pieces() -> None:
    with _opened(128, max_inflight=1, request_bytes=_BLOCK) as (swapper, backend, extent):
        _read(swapper, extent, 0, num_blocks=50, priority=Priority.PREFETCH)
        backend.complete()
        _read(swapper, extent, 100)
        backend.complete()
        assert backend.open[0].offset == 100 * _BLOCK


def test_promotion_moves_a_request_to_the_front() -> None:
    with _opened(16, max_inflight=1) as (swapper, backend, extent):
        _read(swapper, extent, 0)
        handles = [_read(swapper, extent, block, priority=Priority.PREFETCH) for block in range(1, 6)]
        handles[3].promote()
        assert handles[3].priority is Priority.DEMAND
        handles[3].promote(Priority.WRITE_BACK)
        assert handles[3].priority is Priority.DEMAND, "a promotion must never lower a priority"
        backend.complete_all()
        assert [offset // _BLOCK for _, offset, _ in backend.log] == [0, 4, 1, 2, 3, 5]
        handles[0].promote()  # too late, and harmless


def test_a_promoted_read_pulls_the_writes_it_waits_for() -> None:
    with _opened(16, max_inflight=1) as (swapper, backend, extent):
        for block in range(8):
            _write(swapper, extent, block)
        read = _read(swapper, extent, 6, priority=Priority.PREFETCH)
        assert not backend.inflight(Direction.READ), "a read must wait for the write of its bytes"
        read.promote()
        backend.complete_all()
        order = [(name, offset // _BLOCK) for name, offset, _ in backend.log]
        assert order.index(("write", 6)) == 1, "the write that the read waits for was not pulled along"
        assert order.index(("read", 6)) == 2


def test_a_promotion_passes_through_a_chain_of_hazards() -> None:
    with _opened(16, max_inflight=1) as (swapper, backend, extent):
        for block in range(8, 14):
            _write(swapper, extent, block)
        _write(swapper, extent, 0, 2)
        _write(swapper, extent, 1, 2)
        _write(swapper, extent, 2, 2)
        _read(swapper, extent, 3, priority=Priority.DEMAND)  # waits for a write that waits for a write that waits ...
        backend.complete_all()
        order = [(name, offset // _BLOCK) for name, offset, _ in backend.log]
        assert order[1:5] == [("write", 0), ("write", 1), ("write", 2), ("read", 3)]


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("second", ["read", "write"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_hazards_only_between_overlapping_requests_of_which_one_writes(first: str, second: str, shift: int) -> None:
    with _opened(8) as (swapper, backend, extent):
        (_read if first == "read" else _write)(swapper, extent, 2, 2)
        (_read if second == "read" else _write)(swapper, extent, 1 + shift, 1)
        overlaps = shift in (1, 2)
        must_wait = overlaps and (first, second) != ("read", "read")
        assert len(backend.open) == (1 if must_wait else 2)
        backend.complete()
        assert len(backend.open) == 1


def test_all_that_wait_for_each_other_behind_what_hangs_end_at_once() -> None:
    with _opened(8) as (swapper, backend, extent):
        handles = [_write(swapper, extent, 2), *(_write(swapper, extent, 1, 2 + each) for each in range(5))]
        handles.append(_read(swapper, extent, 2))
        swapper._scheduler._tick += TICKS_PER_DEADLINE
        swapper._scheduler._on_tick()
        assert len(swapper._scheduler._active) == 1, "only what hangs is left"
        assert all(isinstance(handle.error, StallError) for handle in handles)
        _write(swapper, extent, 2)  # finds what hangs again
        assert len(swapper._scheduler._active) == len(backend.open) == 1
        while swapper._scheduler.pending.pop() is not None:
            pass
        backend.complete_all()
        _write(swapper, extent, 2)
        backend.complete_all()
        _read(swapper, extent, 2)


@pytest.mark.deep(but=13)
@pytest.mark.parametrize("seed", range(30))
def test_nothing_at_the_backend_touches_what_is_written_there(seed: int) -> None:
    """Whatever completes, fails, hangs and is given up, in whatever order."""
    chance = random.Random(seed)
    backend = ManualBackend(64 * _BLOCK, block_bytes=chance.choice([1, _BLOCK]))
    with _opened(8, backend, max_inflight=chance.choice([1, 4, 64])) as (swapper, _, extent):
        scheduler = swapper._scheduler
        chances = {"ask": 8, "complete": 5, "fail": 1, "hang": chance.choice([0, 1])}
        for action in chance.choices([*chances], [*chances.values()], k=400):
            with contextlib.suppress(SwapperError):  # of bytes whose write has failed, or of what hangs
                if action == "ask":
                    block, do = chance.randrange(8), chance.choice([_read, _write, _write])
                    do(swapper, extent, block, chance.randint(1, 8 - block))
                elif action == "hang":
                    scheduler._tick += TICKS_PER_DEADLINE
                    scheduler._on_tick()
                elif backend.open:
                    index = chance.randrange(len(backend.open))
                    backend.complete(index) if action == "complete" else backend.fail(errno.EIO, index)
            for one, other in itertools.combinations(backend.open, 2):
                apart = one.offset + len(one.memory) <= other.offset or other.offset + len(other.memory) <= one.offset
                assert apart or Direction.WRITE not in (one.direction, other.direction)
        backend.complete_all()
        assert not scheduler._active
        while scheduler.pending.pop() is not None:
            pass


def test_hazards_do_not_reach_into_other_extents() -> None:
    with _opened(1) as (swapper, backend, extent):
        for each in (extent, swapper.allocate(_BLOCK, "y")):
            _write(swapper, each)
        assert len(backend.open) == 2


def test_neighbours_in_one_block_are_a_hazard_where_blocks_are_written_whole() -> None:
    for block_bytes, num_open in ((1, 2), (_BLOCK, 1)):
        with _opened(2, ManualBackend(64 * _BLOCK, block_bytes=block_bytes)) as (swapper, backend, extent):
            swapper.write(extent, np.ones(100, dtype=np.uint8), offset=0)
            swapper.write(extent, np.ones(100, dtype=np.uint8), offset=100)
            assert len(backend.open) == num_open


def test_completions_inside_submit_do_not_grow_the_stack() -> None:
    num_pieces = 5000
    with Swapper(MemoryBackend(num_pieces * _BLOCK), SwapperConfig(request_bytes=_BLOCK)) as swapper:
        extent = swapper.allocate(num_pieces * _BLOCK, "long")
        handle = swapper.write(extent, np.zeros(num_pieces * _BLOCK, dtype=np.uint8))
        assert handle.done()
        assert swapper.statistics().num_writes == num_pieces
