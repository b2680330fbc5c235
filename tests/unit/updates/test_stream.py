"""The update stream: jobs in order, never from stale bytes, and an error reaches everybody who waits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from infinity.numerics.chunk_format import MainWeight
from tests.lazy_device import LazyDevice
from tests.unit.stage import Arrived
from tests.unit.updates.slow_stream import NUMEL, Gradients, SlowStream, slow_stream, soon, wait_for

_KINDS = {
    "fp32": (torch.float32, MainWeight.MODEL_WEIGHT, 1),
    "bf16": (torch.bfloat16, MainWeight.FP32, 3),
    "remainder": (torch.bfloat16, MainWeight.REMAINDER, 1),
}


@pytest.fixture(params=_KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[SlowStream]:
    """A stream with pages to read far ahead."""
    dtype, main, num_workers = _KINDS[request.param]
    with slow_stream(dtype, num_pages=12, main=main, num_workers=num_workers) as opened:
        yield opened


def test_weights_state_and_scalars_after_a_step(bench: SlowStream) -> None:
    unit = bench.units[0]
    job = bench.job(unit, {0: 2.0, 1: 3.0})
    bench.stream.submit(job)
    wait_for(job)
    bench.stream.drain()
    weights = bench.stored_weights(unit)
    slot = unit.layout.slots[1]
    assert torch.equal(weights[: NUMEL - 200], torch.full((NUMEL - 200,), 2.0, dtype=bench.dtype))
    assert torch.equal(weights[slot.start : slot.stop], torch.full((90,), 3.0, dtype=bench.dtype))
    assert bench.totals(unit, 0) == [2.0]
    assert bench.totals(unit, 1) == [3.0]
    state = bench.states[0, 0]
    assert (state.scalars, state.is_fresh, state.names) == ({"step": 1}, False, ("total",)), "once per parameter"
    gradients = job.gradients
    assert isinstance(gradients, Gradients)
    assert gradients.num_released == 1


def test_a_parameter_without_gradient_is_left_alone(bench: SlowStream) -> None:
    unit = bench.units[0]
    for value in (5.0, 7.0):
        bench.stream.submit(bench.job(unit, {1: value}))
    bench.stream.drain()
    assert not bench.stored_weights(unit)[: NUMEL - 200].any()
    assert bench.states[0, 0].is_fresh
    assert bench.states[0, 1].scalars == {"step": 2}
    assert bench.totals(unit, 1) == [12.0]


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


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("num_pages", [1, 2])
def test_few_pages_are_enough(num_pages: int, num_workers: int) -> None:
    with slow_stream(torch.bfloat16, num_pages, num_workers=num_workers) as bench:
        for number in range(4):
            for unit in bench.units:
                bench.stream.submit(bench.job(unit, {0: 2.0**number}))
        bench.stream.drain()
        assert [bench.totals(unit) for unit in bench.units] == [[15.0]] * 3
        assert bench.arena.statistics().most_leased <= num_pages


def test_a_resident_unit_gets_its_new_weights_as_well(bench: SlowStream) -> None:
    unit = bench.units[0]
    unit.adopt(bench.flat(unit))
    for value in (2.0, 3.0):
        job = bench.job(unit, {0: value})
        assert not job.accepts_buffer
        bench.stream.submit(job)
        wait_for(job)
    resident = unit.trainable_view(unit.flat.tensor())
    assert torch.equal(resident[: NUMEL - 200], torch.full_like(resident[: NUMEL - 200], 5.0))
    assert not resident[unit.layout.slots[1].start :].any()
    bench.stream.drain()
    assert torch.equal(bench.stored_weights(unit)[: NUMEL - 200], resident[: NUMEL - 200])


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


def test_an_attached_buffer_is_filled_whole(bench: SlowStream) -> None:
    unit, first = bench.units[0], bench.units[1]
    bench.updater.gate.clear()
    bench.stream.submit(bench.job(first, {0: 1.0}))  # keeps the stream busy
    job = bench.job(unit, {0: 4.0, 1: 5.0})
    job.is_held = True
    assert job.accepts_buffer
    bench.stream.submit(job)
    flat = bench.flat(unit)
    flat.tensor().fill_(255)
    assert job.attach(flat)
    assert not job.attach(bench.flat(unit)), "one is enough"
    bench.updater.gate.set()
    wait_for(job)
    resident = unit.trainable_view(flat.tensor())
    for slot, value in zip(unit.layout.slots, (4.0, 5.0), strict=True):
        assert torch.equal(resident[slot.start : slot.stop], torch.full((slot.numel,), value, dtype=bench.dtype))


def test_a_job_that_has_begun_accepts_no_buffer(bench: SlowStream) -> None:
    bench.updater.gate.clear()
    job = bench.job(bench.units[0], {0: 4.0, 1: 4.0})
    bench.stream.submit(job)
    soon(lambda: not job.accepts_buffer)
    assert not job.attach(bench.flat(bench.units[0]))
    bench.updater.gate.set()
    wait_for(job)


def test_held_jobs_wait_until_somebody_needs_them(bench: SlowStream) -> None:
    jobs = []
    for unit, value in zip(bench.units, (1.0, 2.0, 3.0), strict=True):
        job = bench.job(unit, {1: value})
        job.is_held = value != 3.0
        bench.stream.submit(job)
        jobs.append(job)
    wait_for(jobs[2])
    time.sleep(0.02)
    assert not jobs[0].done()
    assert not jobs[1].done()
    jobs[1].promote()
    wait_for(jobs[1])
    assert not jobs[0].done()
    assert bench.updater.order == [3.0, 2.0]
    bench.stream.drain()
    assert jobs[0].done()
    assert bench.updater.order == [3.0, 2.0, 1.0]
    assert not bench.stream.pending()


def test_a_read_that_fails_fails_the_job(bench: SlowStream) -> None:
    class Lost(Arrived):
        def wait(self) -> None:
            raise OSError("the drive is gone")

    unit = bench.units[0]
    unit.fetch_into(bench.flat(unit), Lost())
    job = bench.job(unit, {0: 1.0})
    bench.stream.submit(job)
    with pytest.raises(OSError, match="the drive is gone"):
        wait_for(job)
    with pytest.raises(OSError, match="the drive is gone"):
        bench.stream.drain()


def test_closing_ends_the_thread_and_everybodys_waiting(bench: SlowStream) -> None:
    held = bench.job(bench.units[0], {0: 1.0})
    held.is_held = True
    bench.stream.submit(held)
    bench.stream.close()
    bench.stream.close()
    assert held.done()
    with pytest.raises(Exception, match="closed"):
        held.wait()
