"""Limited waits: their length, and what a stop of the process costs."""

from __future__ import annotations

import threading

import pytest

from swapper.sync.limits import join_all, wait_in_parts


def test_a_stop_costs_one_part() -> None:
    """Whoever is waited for has a chance afterwards, though the time is over by the clock."""
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)  # the process may stand still in here for hours
        return len(waits) == 2

    assert wait_in_parts(wait, 8.0)
    assert waits == [0.5, 0.5]


def test_all_of_the_time_and_no_more() -> None:
    waits: list[float] = []
    assert not wait_in_parts(lambda seconds: bool(waits.append(seconds)), 8.0)
    assert sum(waits) == pytest.approx(8.0)


def test_threads_are_joined_except_this_one() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not join_all([threading.current_thread(), *threads], 0.02)
    assert not join_all(threads, -1.0)
    over.set()
    assert join_all([threading.current_thread(), *threads], 60.0)
    assert join_all(threads, 0.0)
