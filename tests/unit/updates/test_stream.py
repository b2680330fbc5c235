"""The update stream: jobs in order, never from stale bytes, read ahead of their gradients, by one worker or several."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from infinity.numerics.chunk_format import MainWeight
from infinity.threads.denormals import flushes_denormals
from infinity.units.layout import Chunk, ParameterSlice
from infinity.updates.job import UpdateJob
from tests.lazy_device import LazyDevice
from tests.unit.stage import Arrived
from tests.unit.updates.slow_stream import NUMEL, WAIT_SECONDS, Gradients, SlowStream, slow_stream, wait_for
from tests.waiting import wait_until

_KINDS = {
    "fp32": (torch.float32, MainWeight.MODEL_WEIGHT, 1),
    "bf16": (torch.bfloat16, MainWeight.FP32, 3),
    "remainder": (torch.bfloat16, MainWeight.REMAINDER, 1),
}


@pytest.fixture(params=_KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[SlowStream]:
    """A stream with staging buffers to read far ahead."""
    dtype, main, num_workers = _KINDS[request.param]
    with slow_stream(dtype, num_staging_buffers=12, main=main, num_workers=num_workers) as opened:
        yield opened


@pytest.mark.parametrize("num_jobs", [2, 5])
def test_jobs_for_one_unit_in_the_queue_never_read_what_is_not_yet_written(bench: SlowStream, num_jobs: int) -> None:
    """Writes are slow and reads are not: a chunk read ahead of the update before it would lose that update."""
    unit, other = bench.units[0], bench.units[1]
    bench.updater.gate.clear()
    jobs = []
    for number in range(num_jobs):
        jobs.append(bench.job(unit, {0: 2.0**number, 1: 1.0}))
        bench.stream.submit(jobs[-1])
    bench.stream.submit(bench.job(other, {0: 1.0}))
    time.sleep(0.02)  # whatever is read ahead is read now
    bench.updater.gate.set()
    bench.stream.drain()
    expected = 2.0**num_jobs - 1
    assert bench.totals(unit) == [expected]
    assert bench.totals(unit, 1) == [float(num_jobs)]
    weights = bench.stored_weights(unit)[: NUMEL - 200]
    assert torch.equal(weights, torch.full_like(weights, expected))
    assert bench.totals(other) == [1.0]
    assert all(job.done() for job in jobs)


def test_weights_are_read_from_a_buffer_after_the_copy_that_brings_them() -> None:
    """The copy has been launched, which is all that an arrival promises; it may run much later."""
    device = LazyDevice()
    with slow_stream(torch.float32, 4, device) as bench:
        unit = bench.units[0]
        flat = bench.flat(unit)
        source = torch.full((unit.num_bytes // 4,), 10.0).view(torch.uint8)
        fence = device.upload(flat.tensor(), source, device.mark())

        class Launched(Arrived):
            def wait(self) -> None:
                device.compute_waits_for(fence)

        unit.fetch_into(flat, Launched())
        job = bench.job(unit, {0: 1.0, 1: 1.0})
        bench.stream.submit(job)
        wait_for(job)
        assert not device.violations
        for slot in unit.layout.slots:
            values = unit.trainable_view(flat.tensor())[slot.start : slot.stop]
            assert torch.equal(values, torch.full_like(values, 11))


def test_a_job_that_has_begun_accepts_no_buffer(bench: SlowStream) -> None:
    bench.updater.gate.clear()
    job = bench.job(bench.units[0], {0: 4.0, 1: 4.0})
    bench.stream.submit(job)
    wait_until(lambda: not job.accepts_buffer)
    assert not job.attach(bench.flat(bench.units[0]))
    bench.updater.gate.set()
    wait_for(job)


# ----------------------------------------------------------------------------------------------------- which comes next


@pytest.fixture
def alone() -> Iterator[SlowStream]:
    """A stream that reads ahead no further than one chunk."""
    with slow_stream(torch.bfloat16, num_staging_buffers=1) as opened:
        yield opened


def _held(alone: SlowStream, ranks: list[int]) -> list[UpdateJob]:
    """Jobs of the units in turn, with these ranks, that begin when they are released. Their gradients tell them apart."""
    jobs = []
    for number, rank in enumerate(ranks):
        job = alone.job(alone.units[number % 3], {1: float(number)})
        job.rank = rank
        job.is_held = True
        alone.stream.submit(job)
        jobs.append(job)
    return jobs


def test_who_is_waited_for_goes_first(alone: SlowStream) -> None:
    jobs = _held(alone, [1, 2, 3, 4])
    alone.updater.gate.clear()
    jobs[3].promote()  # which releases it: whoever waits gets it though the others are held
    assert not jobs[3].is_held
    jobs[2].promote()
    alone.updater.gate.set()
    wait_for(jobs[2])
    alone.stream.drain()
    assert alone.updater.order.index(2.0) < alone.updater.order.index(1.0)
    assert jobs[2].rank < min(jobs[0].rank, jobs[1].rank)


def test_updates_of_one_unit_keep_their_order_whatever_their_ranks(alone: SlowStream) -> None:
    jobs = _held(alone, [0, 0, 0, 0])
    assert jobs[0].unit is jobs[3].unit
    jobs[3].rank = -1
    alone.stream.drain()
    assert alone.updater.order.index(0.0) < alone.updater.order.index(3.0)
    assert alone.totals(alone.units[0], 1) == [3.0]


class _Changing(dict[UpdateJob, None]):
    """A dict to which another thread adds a job whenever it is gone through, as it may while garbage is collected."""

    def __iter__(self) -> Iterator[UpdateJob]:
        raise RuntimeError("dictionary changed size during iteration")


def test_jobs_may_be_submitted_while_a_worker_looks_for_the_next_one(alone: SlowStream) -> None:
    alone.stream._pending = _Changing(alone.stream._pending)
    jobs = _held(alone, [2, 1])
    assert alone.stream.pending() == jobs
    alone.stream.drain()
    assert all(job.done() for job in jobs)


# ---------------------------------------------------------------------------------------- read ahead of their gradients


@pytest.fixture(params=[1, 3])
def ahead(request: pytest.FixtureRequest) -> Iterator[SlowStream]:
    """A stream with room to read two units ahead."""
    with slow_stream(torch.bfloat16, num_staging_buffers=9, num_workers=request.param) as opened:
        yield opened


def _step(bench: SlowStream, *numbers: int) -> None:
    for number in numbers:
        bench.stream.submit(bench.job(bench.units[number], {0: 1.0, 1: 1.0}))
    bench.stream.drain()
    bench.swapper.flush()


def _read_ahead(bench: SlowStream, *numbers: int) -> None:
    """Say that it comes again, and wait until the chunks of these units have staging buffers, and no others."""
    owners = [(f"optimizer state of unit {number}", 3) for number in numbers]
    before = bench.swapper.statistics().num_reads
    bench.stream.expect_again()
    wait_until(lambda: bench.swapper.statistics().num_reads == before + 3 * len(numbers))
    wait_until(lambda: bench.staging_pool._owners() == owners)


def test_states_are_read_ahead_in_the_order_of_the_step_before(ahead: SlowStream) -> None:
    def read_bytes() -> int:
        before = ahead.swapper.statistics().read_bytes
        _step(ahead, 2, 0, 1)
        return ahead.swapper.statistics().read_bytes - before

    _step(ahead, 2, 0, 1)
    wait_until(lambda: ahead.staging_pool.num_leased == 0)  # nobody has said that it comes again
    of_step = read_bytes()
    ahead.stream.expect_again()
    _step(ahead, 2, 0, 1)
    _read_ahead(ahead, 2, 0)
    assert read_bytes() == of_step // 3 > 0, "of unit 1 alone"
    assert [ahead.totals(unit) for unit in ahead.units] == [[4.0]] * 3


def test_a_step_that_is_skipped_reads_nothing_twice(ahead: SlowStream) -> None:
    _step(ahead, 0, 1)
    _read_ahead(ahead, 0, 1)
    before = ahead.swapper.statistics().num_reads
    ahead.stream.expect_again()
    _step(ahead, 0, 1)
    assert ahead.swapper.statistics().num_reads == before
    assert [ahead.totals(unit) for unit in ahead.units] == [[2.0], [2.0], [0.0]]


def test_chunks_that_rest_in_memory_take_no_place_of_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.updates.stream._MOST_AHEAD", 4)
    with slow_stream(torch.float32, num_staging_buffers=9) as bench:
        first, second, _ = bench.units
        first.is_persistent = True
        first.flat = bench.flat(first)
        bench.records.allocate(first, bench.chunks(first), ("total",), numel_in_memory=first.layout.trainable_numel)
        bench.updater.gate.clear()
        resident = UpdateJob(
            first,
            bench.chunks(first),
            _Ready(first, {0: 1.0, 1: 1.0}),
            {0: {"lr": 1.0}, 1: {"lr": 1.0}},
            None,
            bench.device.mark(),
        )
        before = bench.swapper.statistics().num_reads
        with bench.stream._order:  # both, before the worker looks
            bench.stream.submit(resident)
            bench.stream.submit(bench.job(second, {0: 1.0, 1: 1.0}))
        # Weights of all chunks of the second, although three of the first are before them and none of these has ended.
        wait_until(lambda: bench.swapper.statistics().num_reads >= before + 3)
        assert not resident.done()
        bench.updater.gate.set()
        bench.stream.drain()


class _Ready(Gradients):
    """They lie where an update can use them."""

    needs_scratch = False

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        return torch.ones(chunk.numel)


# ------------------------------------------------------------------------------------------------------ several workers


def _around_updates(bench: SlowStream, around: Callable[[Callable[[], Any], dict[str, Any]], Any]) -> None:
    """Let ``around(update, scalars)`` call the optimizer's update of each slice."""
    update = bench.updater.update

    def called(
        group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: Any, scalars: dict[str, Any]
    ) -> Any:
        return around(lambda: update(group, weight, grad, state, scalars), scalars)

    bench.updater.update = called  # type: ignore[method-assign]


@pytest.mark.parametrize("num_workers", [2, 5])
def test_the_first_error_is_told_when_nobody_updates_any_more(num_workers: int) -> None:
    """Whoever is told may use the unit's memory for something else at once."""
    go_on = threading.Event()
    failed: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    number = iter(range(100))

    def around(update: Callable[[], Any], _: dict[str, Any]) -> Any:
        if next(number) == 1:
            failed.put(threading.current_thread())
            raise ArithmeticError("the first of two")
        if not go_on.wait(WAIT_SECONDS):
            raise TimeoutError("nobody went on")
        raise ArithmeticError("the second")

    with slow_stream(torch.float32, num_staging_buffers=12, num_workers=num_workers) as bench:
        _around_updates(bench, around)
        jobs = [bench.job(unit, {0: 1.0}) for unit in bench.units]
        for job in jobs:
            bench.stream.submit(job)
        worker = failed.get(timeout=WAIT_SECONDS)
        worker.join(WAIT_SECONDS)
        assert not worker.is_alive()  # the others raise after it
        bench.stream.raise_error()  # there is none yet
        assert not any(job.done() for job in jobs)
        assert [gradients.num_released for gradients in _gradients(jobs)] == [0, 0, 0]
        go_on.set()
        with pytest.raises(ArithmeticError, match="the first of two"):
            bench.stream.drain()
        for job in jobs:
            with pytest.raises(ArithmeticError, match="the first of two"):
                wait_for(job)
        assert [gradients.num_released for gradients in _gradients(jobs)] == [1, 1, 1]
        with pytest.raises(ArithmeticError, match="the first of two"):
            bench.stream.submit(bench.job(bench.units[0], {0: 1.0}))
        bench.swapper.flush()
        wait_until(lambda: bench.staging_pool.num_leased == 0)


def _gradients(jobs: Sequence[Any]) -> list[Gradients]:
    return [job.gradients for job in jobs]


@pytest.mark.usefixtures("several_threads")
def test_each_worker_computes_on_one_thread_and_as_the_training_thread_does() -> None:
    together = threading.Barrier(3)
    seen: set[tuple[str, int, bool, bool]] = set()

    def around(update: Callable[[], Any], _: dict[str, Any]) -> Any:
        together.wait(WAIT_SECONDS)
        name = threading.current_thread().name
        seen.add((name, torch.get_num_threads(), flushes_denormals(), torch.is_grad_enabled()))
        return update()

    with slow_stream(torch.float32, num_staging_buffers=12, num_workers=3) as bench:
        _around_updates(bench, around)
        for flushes in (False, True):
            if not torch.set_flush_denormal(flushes):
                pytest.skip("this processor cannot flush denormals")
            seen.clear()
            for unit in bench.units:  # three chunks each, with one slice of the first parameter
                bench.stream.submit(bench.job(unit, {0: 1.0}))
            bench.stream.drain()
            torch.set_flush_denormal(False)
            assert seen == {(f"infinity-update-{number}", 1, flushes, False) for number in range(3)}


def test_a_page_stays_while_its_weights_are_on_their_way_though_the_next_update_fails() -> None:
    device = LazyDevice()
    with slow_stream(torch.float32, 4, device) as bench:
        unit = bench.units[0]
        unit.adopt(bench.flat(unit))
        bench.updater.fail_at = 1  # of the second chunk, while the first one's weights are on their way
        job = bench.job(unit, {0: 2.0})
        bench.stream.submit(job)
        with pytest.raises(ArithmeticError, match="the optimizer failed"):
            wait_for(job)
        wait_until(lambda: bench.staging_pool.num_leased == 0)
        assert device.num_lazy == 1, "a staging buffer went back before its copy had run"
