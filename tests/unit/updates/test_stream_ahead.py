"""What was updated once is read for the next step before its gradients are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from infinity.units.layout import Chunk, ParameterSlice
from infinity.updates.job import UpdateJob
from tests.unit.updates.slow_stream import Gradients, SlowStream, slow_stream, soon


@pytest.fixture(params=[1, 3])
def bench(request: pytest.FixtureRequest) -> Iterator[SlowStream]:
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
    soon(lambda: bench.swapper.statistics().num_reads == before + 3 * len(numbers))
    soon(lambda: bench.staging_pool._owners() == owners)


def test_in_the_order_of_the_step_before(bench: SlowStream) -> None:
    def read_bytes() -> int:
        before = bench.swapper.statistics().read_bytes
        _step(bench, 2, 0, 1)
        return bench.swapper.statistics().read_bytes - before

    _step(bench, 2, 0, 1)
    soon(lambda: bench.staging_pool.num_leased == 0)  # nobody has said that it comes again
    of_step = read_bytes()
    bench.stream.expect_again()
    _step(bench, 2, 0, 1)
    _read_ahead(bench, 2, 0)
    assert read_bytes() == of_step // 3 > 0, "of unit 1 alone"
    assert [bench.totals(unit) for unit in bench.units] == [[4.0]] * 3


def test_a_step_that_is_skipped_reads_nothing_twice(bench: SlowStream) -> None:
    _step(bench, 0, 1)
    _read_ahead(bench, 0, 1)
    before = bench.swapper.statistics().num_reads
    bench.stream.expect_again()
    _step(bench, 0, 1)
    assert bench.swapper.statistics().num_reads == before
    assert [bench.totals(unit) for unit in bench.units] == [[2.0], [2.0], [0.0]]


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
        soon(lambda: bench.swapper.statistics().num_reads >= before + 3)
        assert not resident.done()
        bench.updater.gate.set()
        bench.stream.drain()


class _Ready(Gradients):
    """They lie where an update can use them."""

    needs_scratch = False

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        return torch.ones(chunk.numel)
