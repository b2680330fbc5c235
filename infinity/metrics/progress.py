"""A progress line on the terminal for work that takes seconds. It never goes to a log or a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.errors import format_bytes

Note = Callable[[int], None]
"""Called with the number of bytes that were just processed."""

# Shorter work shows no line. Then at most five lines a second: each one is a system call.
_FIRST_SECONDS, _BETWEEN_SECONDS = 2.0, 0.2


def silent(num_bytes: int) -> None:
    """A `Note` that shows nothing."""


@contextmanager
def progress(what: str, total_bytes: int, *, is_shown: bool) -> Iterator[Note]:
    """Yield a function to report finished bytes to. After 2 seconds a line shows them, and the time left.

    Args:
        what: is being done.
        total_bytes: in all.
        is_shown: False shows nothing. The line is on stderr, if that is a terminal.
    """
    terminal = sys.stderr
    if not is_shown or not total_bytes or terminal is None or not terminal.isatty():
        yield silent
        return
    began = shown = time.monotonic()
    done = 0

    def note(num_bytes: int) -> None:
        nonlocal done, shown
        done += num_bytes
        now = time.monotonic()
        # Time left: as long for each of the remaining bytes as for those that are done.
        if now - began < _FIRST_SECONDS or now - shown < _BETWEEN_SECONDS or not done:
            return
        shown = now
        left = max((now - began) * (total_bytes - done) / done, 0)
        line = f"{what}: {min(done / total_bytes, 1):.0%} of {format_bytes(total_bytes)}, {left:.0f} s left"
        # \r goes to the begin of the line, and \033[K erases to its end.
        terminal.write(f"\r\033[K{line}")
        terminal.flush()

    try:
        yield note
    finally:
        # The line was shown at least once.
        if shown > began:
            terminal.write("\r\033[K")
            terminal.flush()
