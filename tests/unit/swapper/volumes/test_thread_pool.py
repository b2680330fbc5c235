"""Work in threads, whatever interrupts who brings it."""

from __future__ import annotations

import _thread
import threading

import pytest

from swapper.volumes.thread_pool import ThreadPool


def test_all_is_done_at_the_end_and_results_come_in_order() -> None:
    done: list[int] = []
    with ThreadPool(3) as pool:
        assert pool.map(lambda n: n * n, range(100)) == [n * n for n in range(100)]
        for n in range(50):
            pool.submit(done.append, n)
    assert sorted(done) == list(range(50))


def test_an_error_is_raised_by_the_result_and_others_go_on() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with ThreadPool(1) as pool:
        failed, fine = pool.submit(fail), pool.submit(int, "7")
        with pytest.raises(OSError, match="No space left"):
            failed.result()
        assert fine.result() == 7


@pytest.mark.parametrize("num_to_be_had", [0, 1])
def test_without_threads_the_caller_works(num_to_be_had: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = _thread.start_new_thread, [None] * num_to_be_had

    def start_few(*args: object) -> int:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return start(*args)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(_thread, "start_new_thread", start_few)
    with ThreadPool(3) as pool:
        is_done_here = pool.submit(threading.get_ident).result() == threading.get_ident()
        assert is_done_here == (num_to_be_had == 0)
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
