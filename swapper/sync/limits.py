"""Errors for the system's limits on threads, memory and open files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from swapper.errors import LimitError

_JOIN_SECONDS = 1.0  # for each started thread that has to end because a later one could not start


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
