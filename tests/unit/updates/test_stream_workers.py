"""Several update workers: chunks beside each other, and everything else as with one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from infinity.threads.denormals import flushes_denormals
from infinity.units.layout import Chunk, Piece
from infinity.updates import stream as stream_module
from tests.lazy_device import LazyDevice
from tests.unit.updates.slow_stream import WAIT_SECONDS, Gradients, SlowStream, slow_stream, soon, wait_for


def _around_updates(bench: SlowStream, around: Callable[[Callable[[], Any], dict[str, Any]], Any]) -> None:
    """Let ``around(update, scalars)`` call the optimizer's update of each piece."""
    update = bench.updater.update

    def called(
        group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: Any, scalars: dict[str, Any]
    ) -> Any:
        return around(lambda: update(group, weight, grad, state, scalars), scalars)

    bench.updater.update = called  # type: ignore[method-assign]


def test_the_last_piece_may_be_updated_before_the_first() -> None:
    """Step counts are once per parameter: those of all pieces are the ones before the update, whoever comes first."""
    num_left = [3]
    last = threading.Event()
    seen: list[dict[str, Any]] = []

    def around(update: Callable[[], Any], scalars: dict[str, Any]) -> Any:
        seen.append(dict(scalars))
        is_first, num_left[0] = num_left[0] == 3, num_left[0] - 1
        if is_first and not last.wait(WAIT_SECONDS):
            raise TimeoutError("the others waited for the first")
        result = update()
        if num_left[0] == 0:
            last.set()
        return result

    with slow_stream(torch.float32, num_pages=12, num_workers=2) as bench:
        _around_updates(bench, around)
        for step in range(2):
            num_left[0] = 3
            last.clear()
            job = bench.job(bench.units[0], {0: 2.0})
            bench.stream.submit(job)
            wait_for(job)
            assert bench.states[0, 0].scalars == {"step": step + 1}
            assert bench.totals(bench.units[0]) == [2.0 * (step + 1)]
    assert seen == [{}] * 3 + [{"step": 1}] * 3


def test_gradients_are_used_up_in_order_and_released_when_all_are_used() -> None:
    used: list[int] = []

    class Noted(Gradients):
        def note_used(self, chunk: Chunk) -> None:
            used.append(chunk.index)
            assert not self.num_released

        def of_chunk(self, chunk: Chunk, pieces: Sequence[Piece], scratch: torch.Tensor) -> torch.Tensor:
            if chunk.index == 0:
                soon(lambda: len(bench.updater.order) == 2)
                assert used == []
            return super().of_chunk(chunk, pieces, scratch)

    with slow_stream(torch.float32, num_pages=12, num_workers=3) as bench:
        job = bench.job(bench.units[0], {0: 1.0})
        job.gradients = Noted(bench.units[0], {0: 1.0})
        bench.stream.submit(job)
        wait_for(job)
        assert used == [0, 1, 2]
        assert job.gradients.num_released == 1


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

    with slow_stream(torch.float32, num_pages=12, num_workers=num_workers) as bench:
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
        soon(lambda: bench.arena.statistics().num_leased == 0)


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

    with slow_stream(torch.float32, num_pages=12, num_workers=3) as bench:
        _around_updates(bench, around)
        for flushes in (False, True):
            if not torch.set_flush_denormal(flushes):
                pytest.skip("this processor cannot flush denormals")
            seen.clear()
            for unit in bench.units:  # three chunks each, with one piece of the first parameter
                bench.stream.submit(bench.job(unit, {0: 1.0}))
            bench.stream.drain()
            torch.set_flush_denormal(False)
            assert seen == {(f"infinity-update-{number}", 1, flushes, False) for number in range(3)}


def test_a_page_stays_while_its_weights_are_on_their_way_to_the_device() -> None:
    device = LazyDevice()
    with slow_stream(torch.float32, 2, device, num_workers=2) as bench:
        unit = bench.units[0]
        unit.adopt(bench.flat(unit))
        for value in (2.0, 3.0):
            job = bench.job(unit, {0: value, 1: value})
            bench.stream.submit(job)
            wait_for(job)
        assert device.num_lazy >= 6
        for slot in unit.layout.slots:
            values = unit.trainable_view(unit.flat.tensor())[slot.start : slot.stop]
            assert torch.equal(values, torch.full_like(values, 5.0))


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
        soon(lambda: bench.arena.statistics().num_leased == 0)
        assert device.num_lazy == 1, "a page went back before its copy had run"


def test_the_busy_time_of_several_is_that_in_which_any_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece takes a second of this clock, and all are updated at the same time."""
    now = [0.0]
    together = threading.Barrier(3, action=lambda: now.__setitem__(0, now[0] + 1.0))

    def around(update: Callable[[], Any], _: dict[str, Any]) -> Any:
        together.wait(WAIT_SECONDS)
        return update()

    monkeypatch.setattr(stream_module.time, "perf_counter", lambda: now[0])
    with slow_stream(torch.float32, num_pages=12, num_workers=3) as bench:
        _around_updates(bench, around)
        bench.stream.submit(bench.job(bench.units[0], {0: 1.0}))
        bench.stream.drain()
        assert bench.stream.busy_seconds == 1.0
