"""How the thread that notices transfers which never end counts time."""

from __future__ import annotations

TICKS_PER_DEADLINE = 16
"""What has lasted for so many ticks is late. Counting ticks instead of reading a clock makes a stopped process (SIGSTOP,
a debugger) lose no time: the watchdog stands still with it."""


def tick_seconds(deadline_seconds: float) -> float:
    """Return the time between two ticks: a little less than a whole part of the deadline.

    So ``TICKS_PER_DEADLINE`` ticks after any moment, between 7/8 of the deadline and all of it has passed, with some
    time in hand for a watchdog that wakes up late.
    """
    return deadline_seconds / (TICKS_PER_DEADLINE + 0.5)
