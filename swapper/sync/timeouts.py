"""Waiting for a limited time, of which a process that is stopped (SIGSTOP, a debugger) loses next to nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_NUM_PARTS = 16


def wait_in_parts(wait: Callable[[float], bool], timeout_seconds: float) -> bool:
    """Return whether ``wait(seconds)`` returned true in time. A stop of the process costs one of the parts, at most."""
    return any(wait(timeout_seconds / _NUM_PARTS) for _ in range(_NUM_PARTS))


def join_all(threads: Iterable[threading.Thread], timeout_seconds: float) -> bool:
    """Wait for other threads than this one, so long for all of them; return whether they have ended."""
    left = [thread for thread in threads if thread is not threading.current_thread()]

    def have_ended(seconds: float) -> bool:
        while left:
            left[-1].join(seconds)
            if left[-1].is_alive():
                return False
            left.pop()
        return True

    return wait_in_parts(have_ended, max(0.0, timeout_seconds))
