"""Which update comes next: by rank, then as submitted; whoever is waited for goes first; of one unit, never out of order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.updates.job import UpdateJob
from tests.unit.updates.slow_stream import SlowStream, slow_stream, wait_for


@pytest.fixture
def bench() -> Iterator[SlowStream]:
    """A stream that reads ahead no further than one chunk."""
    with slow_stream(torch.bfloat16, num_staging_buffers=1) as opened:
        yield opened


def _held(bench: SlowStream, ranks: list[int]) -> list[UpdateJob]:
    """Jobs of the units in turn, with these ranks, that begin when they are released. Their gradients tell them apart."""
    jobs = []
    for number, rank in enumerate(ranks):
        job = bench.job(bench.units[number % 3], {1: float(number)})
        job.rank = rank
        job.is_held = True
        bench.stream.submit(job)
        jobs.append(job)
    return jobs


def test_who_is_waited_for_goes_first(bench: SlowStream) -> None:
    jobs = _held(bench, [1, 2, 3, 4])
    bench.updater.gate.clear()
    jobs[3].promote()  # which releases it: whoever waits gets it though the others are held
    assert not jobs[3].is_held
    jobs[2].promote()
    bench.updater.gate.set()
    wait_for(jobs[2])
    bench.stream.drain()
    assert bench.updater.order.index(2.0) < bench.updater.order.index(1.0)
    assert jobs[2].rank < min(jobs[0].rank, jobs[1].rank)


def test_updates_of_one_unit_keep_their_order_whatever_their_ranks(bench: SlowStream) -> None:
    jobs = _held(bench, [0, 0, 0, 0])
    assert jobs[0].unit is jobs[3].unit
    jobs[3].rank = -1
    bench.stream.drain()
    assert bench.updater.order.index(0.0) < bench.updater.order.index(3.0)
    assert bench.totals(bench.units[0], 1) == [3.0]


class _Changing(dict[UpdateJob, None]):
    """A dict to which another thread adds a job whenever it is gone through, as it may while garbage is collected."""

    def __iter__(self) -> Iterator[UpdateJob]:
        raise RuntimeError("dictionary changed size during iteration")


def test_jobs_may_be_submitted_while_a_worker_looks_for_the_next_one(bench: SlowStream) -> None:
    bench.stream._pending = _Changing(bench.stream._pending)
    jobs = _held(bench, [2, 1])
    assert bench.stream.pending() == jobs
    bench.stream.drain()
    assert all(job.done() for job in jobs)
