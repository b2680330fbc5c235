"""What a limit of the system refuses, in words: threads, memory, open files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from swapper.errors import LimitError

_JOIN_SECONDS = 1.0


@contextlib.contextmanager
def limits_in_words() -> Iterator[None]:
    """In here, what a limit of the system refuses becomes a `LimitError`; all other errors stay as they are."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        limit = LimitError.of(error)
        if limit is None:
            raise
        try:
            raise limit from error
        finally:
            del limit  # its traceback has this frame, and would keep what failed alive


def start_threads(*threads: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Start threads, all or none.

    Args:
        threads: Those to start.
        stop: Makes those end that have been started, if one cannot be.

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
