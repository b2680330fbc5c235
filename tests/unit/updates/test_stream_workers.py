"""Several update workers: chunks beside each other, and everything else as with one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from infinity.threads.denormals import flushes_denormals
from tests.lazy_device import LazyDevice
from tests.unit.updates.slow_stream import WAIT_SECONDS, Gradients, SlowStream, slow_stream, soon, wait_for


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
        soon(lambda: bench.staging_pool.num_leased == 0)


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
        soon(lambda: bench.staging_pool.num_leased == 0)
        assert device.num_lazy == 1, "a staging buffer went back before its copy had run"
