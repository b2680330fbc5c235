"""Work in threads, whatever interrupts who brings it."""

from __future__ import annotations

import _thread
import threading

import pytest

from swapper.volumes.thread_pool import ThreadPool


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
