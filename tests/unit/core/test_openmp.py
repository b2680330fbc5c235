"""Which threads torch's operators leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from infinity import openmp
from infinity.vertical.baton import Lane

pytestmark = pytest.mark.skipif(not openmp._libraries(), reason="torch computes without GNU's OpenMP library here")

_NUM_THREADS = 3


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(_NUM_THREADS)
    yield
    torch.set_num_threads(before)


def compute() -> int:
    """Computes with as many threads as this one may use, and returns how many the process has."""
    values = torch.ones(1 << 20)
    assert float((values + values).sum()) == 2 << 20
    return psutil.Process().num_threads()


def in_a_thread(function: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_workers_are_released_and_come_back() -> None:
    def work() -> None:
        before = psutil.Process().num_threads()
        for _ in range(3):
            assert compute() == before + _NUM_THREADS - 1
            openmp.release_workers()
            assert psutil.Process().num_threads() == before
        openmp.release_workers()  # there are none

    in_a_thread(work)


def test_other_threads_keep_their_workers() -> None:
    compute()  # this thread has its workers now
    before = psutil.Process().num_threads()

    def work() -> None:
        compute()
        openmp.release_workers()

    in_a_thread(work)
    assert compute() == before


def test_one_thread_does_without_workers() -> None:
    def work() -> None:
        openmp.use_one_thread()
        before = psutil.Process().num_threads()
        assert torch.get_num_threads() == 1
        assert compute() == before

    in_a_thread(work)
    assert torch.get_num_threads() == _NUM_THREADS
    in_a_thread(lambda: torch.get_num_threads() == _NUM_THREADS or pytest.fail("a new thread got another number"))


def test_a_parked_lane_has_no_workers() -> None:
    lane = Lane(0)
    lane.start()
    counts: list[int] = []

    def job() -> None:
        for _ in range(2):
            counts.append(compute())
            lane.park("half")
        counts.append(compute())

    before = psutil.Process().num_threads()
    lane.begin(job)
    for _ in range(3):
        lane.resume()
        assert psutil.Process().num_threads() == before
    assert counts == [before + _NUM_THREADS - 1] * 3
    lane.close()
