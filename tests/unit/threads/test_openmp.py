"""Which threads torch's operators leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from infinity.threads import openmp
from infinity.vertical.microbatch import MicroBatchThread
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not openmp._libraries(), reason="torch computes without GNU's OpenMP library here")

_NUM_THREADS = 3


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(_NUM_THREADS)
    yield
    torch.set_num_threads(before)


def threads() -> set[int]:
    """The process's threads. Not their number: a thread that others have ended leaves only when a processor is free."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def compute() -> None:
    """Computes with as many threads as this one may use."""
    values = torch.ones(1 << 20)
    assert float((values + values).sum()) == 2 << 20


def test_workers_are_released_and_come_back() -> None:
    def work() -> None:
        before = threads()
        for _ in range(3):
            compute()
            assert len(threads() - before) == _NUM_THREADS - 1
            openmp.end_openmp_workers()
            wait_until(lambda: threads() <= before)
        openmp.end_openmp_workers()  # there are none

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_a_paused_thread_has_no_workers() -> None:
    counts: list[int] = []

    def compute_and_count() -> None:
        compute()
        counts.append(len(threads() - before))

    def job() -> None:
        for _ in range(2):
            compute_and_count()
            thread.pause()
        compute_and_count()

    thread = MicroBatchThread(0)
    thread.begin(job)
    before = threads()
    for _ in range(3):
        thread.resume()
        wait_until(lambda: threads() <= before)
    assert counts == [_NUM_THREADS - 1] * 3
    assert thread.is_over
    thread.abandon()
