"""The update stream: jobs in order, and never from stale bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from infinity.numerics.chunk_format import MainWeight
from tests.lazy_device import LazyDevice
from tests.unit.stage import Arrived
from tests.unit.updates.slow_stream import NUMEL, SlowStream, slow_stream, soon, wait_for

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
    soon(lambda: not job.accepts_buffer)
    assert not job.attach(bench.flat(bench.units[0]))
    bench.updater.gate.set()
    wait_for(job)
