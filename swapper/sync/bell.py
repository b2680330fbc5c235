"""What one thread sleeps on and another wakes, also if a signal comes in between.

[Note: bells] ``threading.Event`` and ``threading.Condition`` are written in Python. A KeyboardInterrupt inside of them can
leave their lock taken, and then whoever wants to wake somebody waits for ever. To acquire or release a bare lock is one
step, which happens or does not.
"""

from __future__ import annotations

import contextlib
import threading

_LOOK_UP_SECONDS = 1.0


class Bell:
    """Wakes one waiting thread. A ring while nobody waits ends the next `wait` at once; several rings count as one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake who waits. From any thread."""
        with contextlib.suppress(RuntimeError):  # it was rung, and nobody has heard it yet
            self._lock.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until somebody rings; return whether that happened in time."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)


class Latch:
    """Something that happens once, and that any number of threads may wait for: ``threading.Event`` without `clear`."""

    __slots__ = ("_bell", "_is_set")

    def __init__(self) -> None:
        self._bell = Bell()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened. From any thread."""
        self._is_set = True
        self._bell.ring()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until it has happened; return whether it has."""
        while not self._is_set:
            # Now and then it looks up: whom an interrupt keeps from passing the ring on leaves the others asleep.
            if self._bell.wait(_LOOK_UP_SECONDS if timeout_seconds is None else timeout_seconds):
                self._bell.ring()  # for the next one
            elif timeout_seconds is not None:
                break
        return self._is_set
