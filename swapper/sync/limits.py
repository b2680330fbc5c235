"""The system's limits on threads, memory and open files; and limits of time, which a stop of the process (SIGSTOP, a
debugger) does not use up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from swapper.errors import LimitError

_JOIN_SECONDS = 1.0  # for each started thread that has to end because a later one could not start
_NUM_PARTS = 16  # a stop of any length uses up one part: 1/16 of the timeout


@contextlib.contextmanager
def limits_in_words() -> Iterator[None]:
    """Inside the block, turn an error from a limit of the system into a `LimitError`, which names the limit."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
        limit = LimitError.of(error)
        if limit is None:
            raise
        try:
            raise limit from error
        finally:
            del limit  # a cycle: its traceback refers to this frame. It would keep files and memory of the failure


def start_threads(*threads: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Start threads, all or none.

    Args:
        threads: Those to start.
        stop: Makes the started ones end if one cannot be started.

    Raises:
        LimitError: The system gives no more.
    """
    begun: list[threading.Thread] = []
    try:
        with limits_in_words():
            for thread in threads:
                thread.start()
                begun.append(thread)
    except BaseException:
        stop()
        for thread in begun:
            thread.join(_JOIN_SECONDS)
        raise


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
