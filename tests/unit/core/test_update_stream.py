"""The update stream: jobs in order, never from stale bytes, and an error reaches everybody who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from infinity.device import ComputeDevice, FlatBuffer
from infinity.layout import CHUNK_GRANULE, Chunk, Piece, Slot
from infinity.records import PagedRecords, workspace_bytes
from infinity.unit import Unit
from infinity.update import UpdateStream
from infinity.update_job import ParameterState, UpdateJob
from infinity.weights import WeightStore
from swapper import Handle, StagingArena, Swapper, SwapperConfig
from swapper.backends import LatencyBackend, MemoryBackend
from tests.unit.core.stage import Arrived, trainable_unit

_NUMEL = 3 * CHUNK_GRANULE
_WAIT_SECONDS = 20


class Gradients:
    """Gradients in memory: the value of each parameter's, by slot index."""

    def __init__(self, unit: Unit, values: Mapping[int, float]) -> None:
        self._slots = [slot for slot in unit.layout.slots if slot.index in values]
        self._values = values
        self.num_released = 0

    def slots(self) -> Sequence[Slot]:
        return self._slots

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        return None

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        return scratch.fill_(self._values[piece.slot.index])

    def release(self) -> None:
        self.num_released += 1


class Summing:
    """An optimizer whose result tells what it saw: weight += lr * grad, and the state counts and sums.

    Attributes:
        gate: the update waits for it.
        fail_at: raise in the n-th piece from now.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.order: list[float] = []

    def update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, torch.Tensor] | None,
        scalars: dict[str, Any],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if not self.gate.wait(_WAIT_SECONDS):
            raise TimeoutError("the test forgot the gate")
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise ArithmeticError("the optimizer failed")
        self.order.append(float(grad[0]))
        if state is None:
            state = {"total": torch.zeros_like(weight)}
        state["total"].add_(grad)
        weight.add_(grad, alpha=group["lr"])
        return state, {"step": scalars.get("step", 0) + 1}


@dataclass
class _Stream:
    """A stream over slow storage, so that a read that comes too early is there too early."""

    stream: UpdateStream
    updater: Summing
    records: PagedRecords
    weights: WeightStore
    swapper: Swapper
    arena: StagingArena
    units: list[Unit]
    states: dict[tuple[int, int], ParameterState]
    dtype: torch.dtype

    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        return unit.layout.chunks(CHUNK_GRANULE)

    def job(self, unit: Unit, values: Mapping[int, float], *, coefficient: float | None = None) -> UpdateJob:
        gradients = Gradients(unit, values)
        clip = None if coefficient is None else torch.tensor(coefficient)
        return UpdateJob(unit, self.chunks(unit), gradients, {index: {"lr": 1.0} for index in values}, clip, lambda: None)

    def stored_weights(self, unit: Unit) -> torch.Tensor:
        assert unit.extent is not None
        base = torch.zeros(unit.num_bytes, dtype=torch.uint8)
        self.swapper.read(unit.extent, base).wait()
        return unit.trainable_view(base).clone()

    def totals(self, unit: Unit, slot: int = 0) -> list[float]:
        """The distinct values of a parameter's state."""
        found: set[float] = set()
        for chunk in self.chunks(unit):
            lease = self.records.open(unit, chunk, is_blocking=True)
            assert lease is not None
            lease.wait()
            for piece in chunk.pieces:
                if piece.slot.index == slot:
                    total = lease.workspace.states["total"]
                    found |= set(total[piece.offset : piece.offset + piece.numel].tolist())
            lease.discard()
        return sorted(found)

    def flat(self, unit: Unit) -> FlatBuffer:
        flat = ComputeDevice().allocate_flat(unit.num_bytes)
        flat.tensor().zero_()
        return flat


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def bench(request: pytest.FixtureRequest) -> Iterator[_Stream]:
    """A stream with pages to read far ahead."""
    with _stream(request.param, num_pages=12) as opened:
        yield opened


@contextmanager
def _stream(dtype: torch.dtype, num_pages: int) -> Iterator[_Stream]:
    backend = LatencyBackend(MemoryBackend(1 << 20, 4), read_seconds=0.0, write_seconds=0.004)
    swapper = Swapper(backend, SwapperConfig(deadline_seconds=_WAIT_SECONDS))
    arena = StagingArena(workspace_bytes(CHUNK_GRANULE, 1, dtype.itemsize), num_pages, deadline_seconds=_WAIT_SECONDS)
    units = [trainable_unit(index, [(_NUMEL - 200,), (90,)], dtype) for index in range(3)]
    records = PagedRecords(swapper, arena, dtype)
    weights = WeightStore(swapper, ComputeDevice())
    states = {}
    for unit in units:
        chunks = unit.layout.chunks(CHUNK_GRANULE)
        weights.allocate(unit)
        records.allocate(unit, chunks, ("total",))
        weights.write_all(unit, torch.zeros(unit.num_bytes, dtype=torch.uint8)).wait()
        for slot in unit.layout.slots:
            states[unit.index, slot.index] = ParameterState()
        for chunk in chunks:
            lease = records.open(unit, chunk, is_blocking=True)
            assert lease is not None
            lease.wait()
            lease.workspace.main.zero_()
            lease.write_back([], main_only=True)
    updater = Summing()
    stream = UpdateStream(records, weights, updater, ComputeDevice(), states)
    yield _Stream(stream, updater, records, weights, swapper, arena, units, states, dtype)
    updater.gate.set()
    stream.close()
    swapper.close()
    arena.close()


def _soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it never happened")
        time.sleep(0.001)


def _wait(job: UpdateJob) -> None:
    """`UpdateJob.wait` with an end: a hang has to fail here and not in the whole suite's timeout."""
    _soon(job.done)
    job.wait()


def test_weights_state_and_scalars_after_a_step(bench: _Stream) -> None:
    unit = bench.units[0]
    job = bench.job(unit, {0: 2.0, 1: 3.0})
    bench.stream.submit(job)
    _wait(job)
    bench.stream.drain()
    weights = bench.stored_weights(unit)
    slot = unit.layout.slots[1]
    assert torch.equal(weights[: _NUMEL - 200], torch.full((_NUMEL - 200,), 2.0, dtype=bench.dtype))
    assert torch.equal(weights[slot.start : slot.stop], torch.full((90,), 3.0, dtype=bench.dtype))
    assert bench.totals(unit, 0) == [2.0]
    assert bench.totals(unit, 1) == [3.0]
    state = bench.states[0, 0]
    assert (state.scalars, state.is_fresh, state.names) == ({"step": 1}, False, ("total",)), "once per parameter"
    gradients = job.gradients
    assert isinstance(gradients, Gradients)
    assert gradients.num_released == 1


def test_a_parameter_without_gradient_is_left_alone(bench: _Stream) -> None:
    unit = bench.units[0]
    for value in (5.0, 7.0):
        bench.stream.submit(bench.job(unit, {1: value}))
    bench.stream.drain()
    assert not bench.stored_weights(unit)[: _NUMEL - 200].any()
    assert bench.states[0, 0].is_fresh
    assert bench.states[0, 1].scalars == {"step": 2}
    assert bench.totals(unit, 1) == [12.0]


@pytest.mark.parametrize("num_jobs", [2, 5])
def test_jobs_for_one_unit_in_the_queue_never_read_what_is_not_yet_written(bench: _Stream, num_jobs: int) -> None:
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
    weights = bench.stored_weights(unit)[: _NUMEL - 200]
    assert torch.equal(weights, torch.full_like(weights, expected))
    assert bench.totals(other) == [1.0]
    assert all(job.done() for job in jobs)


@pytest.mark.parametrize("num_pages", [1, 2])
def test_few_pages_are_enough(num_pages: int) -> None:
    with _stream(torch.bfloat16, num_pages) as bench:
        for number in range(4):
            for unit in bench.units:
                bench.stream.submit(bench.job(unit, {0: 2.0**number}))
        bench.stream.drain()
        assert [bench.totals(unit) for unit in bench.units] == [[15.0]] * 3
        assert bench.arena.statistics().most_leased <= num_pages


def test_gradients_are_clipped(bench: _Stream) -> None:
    bench.stream.submit(bench.job(bench.units[0], {0: 8.0}, coefficient=0.25))
    bench.stream.drain()
    assert bench.totals(bench.units[0]) == [2.0]


def test_a_resident_unit_gets_its_new_weights_as_well(bench: _Stream) -> None:
    unit = bench.units[0]
    unit.flat = bench.flat(unit)
    for value in (2.0, 3.0):
        job = bench.job(unit, {0: value})
        assert not job.accepts_buffer
        bench.stream.submit(job)
        _wait(job)
    resident = unit.trainable_view(unit.flat.tensor())
    assert torch.equal(resident[: _NUMEL - 200], torch.full_like(resident[: _NUMEL - 200], 5.0))
    assert not resident[unit.layout.slots[1].start :].any()
    bench.stream.drain()
    assert torch.equal(bench.stored_weights(unit)[: _NUMEL - 200], resident[: _NUMEL - 200])


def test_weights_on_their_way_arrive_before_they_are_updated(bench: _Stream) -> None:
    unit = bench.units[0]
    flat = bench.flat(unit)
    unit.flat = flat

    class Late(Arrived):
        """Brings the present weights only when somebody waits."""

        def wait(self) -> None:
            unit.trainable_view(flat.tensor()).fill_(10)

        def done(self) -> bool:
            return False

    unit.arrival = Late()
    bench.weights.write_all(unit, torch.full((unit.num_bytes // bench.dtype.itemsize,), 10, dtype=bench.dtype)).wait()
    if bench.dtype != torch.float32:
        for chunk in bench.chunks(unit):
            lease = bench.records.open(unit, chunk, is_blocking=True)
            assert lease is not None
            lease.wait()
            lease.workspace.main.fill_(10)
            lease.write_back([], main_only=True)
    job = bench.job(unit, {0: 1.0, 1: 1.0})
    bench.stream.submit(job)
    _wait(job)
    for slot in unit.layout.slots:
        values = unit.trainable_view(flat.tensor())[slot.start : slot.stop]
        assert torch.equal(values, torch.full_like(values, 11))


def test_an_attached_buffer_is_filled_whole(bench: _Stream) -> None:
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
    _wait(job)
    resident = unit.trainable_view(flat.tensor())
    for slot, value in zip(unit.layout.slots, (4.0, 5.0), strict=True):
        assert torch.equal(resident[slot.start : slot.stop], torch.full((slot.numel,), value, dtype=bench.dtype))


def test_no_buffer_is_accepted_when_some_weights_are_not_updated(bench: _Stream) -> None:
    job = bench.job(bench.units[0], {1: 4.0})
    assert len(job.chunks) < len(bench.chunks(bench.units[0]))
    assert not job.accepts_buffer
    assert not job.attach(bench.flat(bench.units[0]))


def test_a_job_that_has_begun_accepts_no_buffer(bench: _Stream) -> None:
    bench.updater.gate.clear()
    job = bench.job(bench.units[0], {0: 4.0, 1: 4.0})
    bench.stream.submit(job)
    _soon(lambda: not job.accepts_buffer)
    assert not job.attach(bench.flat(bench.units[0]))
    bench.updater.gate.set()
    _wait(job)


def test_held_jobs_wait_until_somebody_needs_them(bench: _Stream) -> None:
    jobs = []
    for unit, value in zip(bench.units, (1.0, 2.0, 3.0), strict=True):
        job = bench.job(unit, {1: value})
        job.is_held = value != 3.0
        bench.stream.submit(job)
        jobs.append(job)
    _wait(jobs[2])
    time.sleep(0.02)
    assert not jobs[0].done()
    assert not jobs[1].done()
    jobs[1].promote()
    _wait(jobs[1])
    assert not jobs[0].done()
    assert bench.updater.order == [3.0, 2.0]
    bench.stream.drain()
    assert jobs[0].done()
    assert bench.updater.order == [3.0, 2.0, 1.0]
    assert bench.stream.num_pending == 0


def test_a_job_without_gradients_is_done_at_once(bench: _Stream) -> None:
    job = bench.job(bench.units[0], {})
    bench.stream.submit(job)
    _wait(job)
    assert bench.states[0, 0].is_fresh


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_an_optimizer_that_fails_fails_everybody_who_waits(bench: _Stream, fail_at: int) -> None:
    bench.updater.gate.clear()
    bench.updater.fail_at = fail_at
    jobs = [bench.job(unit, {0: 1.0, 1: 1.0}) for unit in bench.units]
    jobs[2].is_held = True
    for job in jobs:
        bench.stream.submit(job)
    failures: list[BaseException] = []

    def drain() -> None:
        try:
            bench.stream.drain()
        except ArithmeticError as error:
            failures.append(error)

    waiter = threading.Thread(target=drain)
    waiter.start()
    bench.updater.gate.set()
    waiter.join(_WAIT_SECONDS)
    assert len(failures) == 1
    for number, job in enumerate(jobs):
        # A unit has four pieces: the first job survives none of these failures.
        with pytest.raises(ArithmeticError, match="the optimizer failed"):
            _wait(job)
        gradients = job.gradients
        assert isinstance(gradients, Gradients)
        assert gradients.num_released == 1, f"job {number}"
    with pytest.raises(ArithmeticError):
        bench.stream.raise_error()
    with pytest.raises(ArithmeticError):
        bench.stream.submit(bench.job(bench.units[0], {0: 1.0}))
    bench.swapper.flush()
    _soon(lambda: bench.arena.statistics().num_leased == 0)


def test_a_failure_after_some_jobs_leaves_those_done(bench: _Stream) -> None:
    first = bench.job(bench.units[0], {1: 1.0})
    bench.stream.submit(first)
    _wait(first)
    bench.updater.fail_at = 0
    second = bench.job(bench.units[1], {1: 1.0})
    bench.stream.submit(second)
    with pytest.raises(ArithmeticError):
        _wait(second)
    first.wait()


def test_a_read_that_fails_fails_the_job(bench: _Stream) -> None:
    class Lost(Arrived):
        def wait(self) -> None:
            raise OSError("the drive is gone")

    unit = bench.units[0]
    unit.flat, unit.arrival = bench.flat(unit), Lost()
    job = bench.job(unit, {0: 1.0})
    bench.stream.submit(job)
    with pytest.raises(OSError, match="the drive is gone"):
        _wait(job)
    with pytest.raises(OSError, match="the drive is gone"):
        bench.stream.drain()


def test_a_refused_job_does_not_make_anybody_wait_for_ever(bench: _Stream) -> None:
    """The unit knows its update before the stream does; if the stream refuses, the wait must end all the same."""
    bench.updater.fail_at = 0
    bench.stream.submit(bench.job(bench.units[0], {1: 1.0}))
    with pytest.raises(ArithmeticError):
        bench.stream.drain()
    late = bench.job(bench.units[1], {1: 1.0})
    with pytest.raises(ArithmeticError):
        bench.stream.submit(late)
    assert late.done()
    with pytest.raises(ArithmeticError):
        late.wait()


def test_closing_ends_the_thread_and_everybodys_waiting(bench: _Stream) -> None:
    held = bench.job(bench.units[0], {0: 1.0})
    held.is_held = True
    bench.stream.submit(held)
    bench.stream.close()
    bench.stream.close()
    assert held.done()
    with pytest.raises(Exception, match="closed"):
        held.wait()
