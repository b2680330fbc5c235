"""What one thread sleeps on and another wakes, also if a signal comes in between.

[Note: bells] ``threading.Event`` and ``threading.Condition`` are written in Python. A KeyboardInterrupt inside of them can
leave their lock taken, and then whoever wants to wake somebody waits for ever. To acquire or release a bare lock is one
step, which happens or does not.
"""

from __future__ import annotations

import threading


class Bell:
    """Wakes one waiting thread. A ring while nobody waits ends the next `wait` at once; several rings count as one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake who waits. From any thread."""
        try:  # noqa: SIM105 (called for each request: a context manager takes five times as long)
            self._lock.release()
        except RuntimeError:  # it was rung, and nobody has heard it yet
            pass

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until somebody rings; return whether that happened in time."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)


class Latch:
    """Something that happens once, and that any number of threads may wait for: ``threading.Event`` without `clear`."""

    __slots__ = ("_bells", "_is_set")

    def __init__(self) -> None:
        self._bells: list[Bell] = []
        """Of those who wait, or have waited: one for each."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened. From any thread."""
        self._is_set = True
        for bell in tuple(self._bells):
            bell.ring()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until it has happened; return whether it has."""
        if not self._is_set:
            bell = Bell()
            self._bells.append(bell)  # before the next look: whoever sets it from now on rings
            if not self._is_set:
                bell.wait(timeout_seconds)
            self._bells.remove(bell)
        return self._is_set
