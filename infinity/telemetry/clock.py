"""Counts the seconds that the training thread waits, by cause.

Knows time only; must not know what it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_CAUSES = {
    "read": "reads from NVMe",
    "update": "the optimizer",
    "gradients": "room for gradients",
    "write": "writes to NVMe",
}


class StepClock:
    """Seconds waited since the last `reset`, by cause: "read", "update", "gradients" or "write"."""

    def __init__(self) -> None:
        self.waited_seconds: dict[str, float] = dict.fromkeys(_CAUSES, 0.0)
        self.waiting_for = ""
        self.began_seconds = time.perf_counter()

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """The thread waits inside the ``with`` block."""
        begin = time.perf_counter()
        self.waiting_for = _CAUSES[cause]
        try:
            yield
        finally:
            self.waited_seconds[cause] += time.perf_counter() - begin
            self.waiting_for = ""

    def reset(self) -> float:
        """Begin a new step. Returns the seconds since the last reset."""
        now = time.perf_counter()
        elapsed = now - self.began_seconds
        self.began_seconds = now
        self.waited_seconds = dict.fromkeys(_CAUSES, 0.0)
        return elapsed
