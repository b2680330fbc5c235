"""How long the drive was at work, whoever gave it work: counted against brute force, and seen through a swapper."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper import ALIGNMENT, BusyTimes, Direction, Statistics, Swapper, SwapperConfig, TransferRecord, meters
from swapper.scheduling import scheduler, transfer_queue
from tests.manual_backend import ManualBackend

pytestmark = pytest.mark.off_main_thread

_CAPACITY = 256 * ALIGNMENT
_WORKERS = ("a", "b", "c")


class _Clock:
    """A second passes whenever somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Clock]:
    """The clock that busy times go by."""
    clock = _Clock()
    for module in (meters, scheduler, transfer_queue):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    yield clock


_EVENTS = st.lists(st.tuples(st.sampled_from(_WORKERS), st.sampled_from(Direction), st.booleans(), st.integers(0, 3)))


@given(_EVENTS)
def test_against_counting_every_second(events: list[tuple[str, Direction, bool, int]]) -> None:
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meters, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        times = BusyTimes(total := BusyTimes())
        workers = {(worker, direction): times.watch(direction) for worker in _WORKERS for direction in Direction}
        at_work: set[tuple[str, Direction]] = set()
        expected = [0, 0, 0]
        for worker, direction, begins, seconds in events:
            for spans in workers[worker, direction]:
                if begins and not spans.begun:
                    spans.begun.append(clock.now)
                elif not begins and spans.begun:
                    spans.ended.append((spans.begun.pop(), clock.now))
            (at_work.add if begins else at_work.discard)((worker, direction))
            clock.now += seconds
            for one in Direction:
                expected[one] += seconds * any(other is one for _, other in at_work)
            expected[2] += seconds * bool(at_work)
            assert list(times.seconds()) == list(total.seconds()) == expected


def test_statistics_give_the_union_at_any_moment(clock: _Clock) -> None:
    backend = ManualBackend(_CAPACITY)
    with Swapper(backend, SwapperConfig(max_inflight=2)) as opened:
        extent = opened.allocate(8 * ALIGNMENT, "x")
        for block in range(4):
            opened.write(extent, np.zeros(ALIGNMENT, dtype=np.uint8), offset=block * ALIGNMENT)
        clock.now += 1
        assert _busy(opened.statistics()) == (0, 1, 1)
        backend.complete_all()
        clock.now += 2
        assert _busy(opened.statistics()) == (0, 1, 1), "nothing is at the backend"
        opened.read(extent, np.zeros(ALIGNMENT, dtype=np.uint8))
        clock.now += 4
        opened.write(extent, np.zeros(ALIGNMENT, dtype=np.uint8), offset=4 * ALIGNMENT)
        clock.now += 8
        assert _busy(opened.statistics()) == (12, 9, 13), "what still runs counts"
        backend.complete(0)
        clock.now += 16
        backend.complete(0)
        clock.now += 32
        before = opened.statistics()
        assert _busy(before) == (12, 25, 29)
        clock.now += 1
        assert _busy(opened.statistics() - before) == (0, 0, 0)


def _busy(statistics: Statistics) -> tuple[float, float, float]:
    return statistics.read_busy_seconds, statistics.write_busy_seconds, statistics.busy_seconds


def test_every_transfer_is_told_once_with_its_bytes_and_times() -> None:
    backend = ManualBackend(_CAPACITY)
    records: list[TransferRecord] = []
    with Swapper(backend, SwapperConfig(request_bytes=2 * ALIGNMENT, max_inflight=2)) as opened:
        extent = opened.allocate(16 * ALIGNMENT, "weights of x")
        opened.write(extent, np.zeros(6 * ALIGNMENT, dtype=np.uint8))
        backend.complete_all()
        assert records == [], "nobody observed"
        opened.observe(records.append)
        before = opened.statistics()
        opened.write(extent, np.zeros(6 * ALIGNMENT, dtype=np.uint8))
        opened.read(extent, np.zeros(100, dtype=np.uint8), offset=8 * ALIGNMENT - 100 - 2 * ALIGNMENT)
        backend.complete_all()
        opened.flush()
        moved = opened.statistics() - before
        assert [record.direction for record in records] == [Direction.WRITE] * 3 + [Direction.READ]
        assert {record.extent_name for record in records} == {"weights of x"}
        assert sum(r.num_bytes for r in records if r.direction is Direction.WRITE) == moved.write_bytes
        assert sum(r.num_bytes for r in records if r.direction is Direction.READ) == moved.read_bytes == 100
        for record in records:
            assert record.began_seconds <= record.ended_seconds
            assert record.queued_seconds >= 0
        ends = [record.ended_seconds for record in records]
        assert ends == sorted(ends)
        # Two at a time: the third piece of the write waits for the first.
        assert records[2].queued_seconds > records[0].queued_seconds


def test_short_and_failed_transfers_are_told_with_the_bytes_that_count() -> None:
    backend = ManualBackend(_CAPACITY)
    records: list[TransferRecord] = []
    with Swapper(backend, SwapperConfig(max_retries=2)) as opened:
        extent = opened.allocate(4 * ALIGNMENT, "x")
        opened.observe(records.append)
        handle = opened.write(extent, np.zeros(4 * ALIGNMENT, dtype=np.uint8))
        backend.open.pop().complete(3 * ALIGNMENT + 100)
        backend.complete_all()
        handle.wait()
        assert [record.num_bytes for record in records] == [3 * ALIGNMENT, ALIGNMENT]
        assert opened.statistics().write_bytes == 4 * ALIGNMENT
        failing = opened.write(extent, np.zeros(ALIGNMENT, dtype=np.uint8))
        backend.fail(5)
        with pytest.raises(Exception, match="errno 5"):
            failing.wait()
        assert [record.num_bytes for record in records[2:]] == [0]
