"""Timeouts that a stop of the process (SIGSTOP, a debugger) does not use up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_NUM_PARTS = 16  # a stop of any length uses up one part: 1/16 of the timeout


def wait_in_parts(wait: Callable[[float], bool], timeout_seconds: float) -> bool:
    """Call ``wait(seconds)`` for parts of the timeout; return whether one of the calls returned true."""
    return any(wait(timeout_seconds / _NUM_PARTS) for _ in range(_NUM_PARTS))


def join_all(threads: Iterable[threading.Thread], timeout_seconds: float) -> bool:
    """Wait for threads, with one timeout for all of them; return whether they have ended."""
    left = [thread for thread in threads if thread is not threading.current_thread()]  # joining itself would raise

    def have_ended(seconds: float) -> bool:
        while left:
            left[-1].join(seconds)
            if left[-1].is_alive():
                return False
            left.pop()
        return True

    return wait_in_parts(have_ended, max(0.0, timeout_seconds))
