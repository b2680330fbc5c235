"""Bells and latches: no ring is lost, and everybody hears that something has happened."""

from __future__ import annotations

import threading

from swapper import Bell, Latch

_WAIT_SECONDS = 20.0


def test_a_ring_before_the_wait_is_heard_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(_WAIT_SECONDS)
    assert not bell.wait(0.01)


def test_a_latch_wakes_all_who_wait_and_all_who_come_later() -> None:
    latch = Latch()
    assert not latch.wait(0.01) and not latch.is_set()
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(latch.wait(_WAIT_SECONDS))) for _ in range(4)]
    threads.append(threading.Thread(target=lambda: heard.append(latch.wait())))
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(_WAIT_SECONDS)
    assert heard == [True] * 5
    assert latch.wait(0.0) and latch.is_set()
