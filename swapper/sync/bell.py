"""Events between threads that a KeyboardInterrupt cannot break.

[Note: bells] ``threading.Event`` and ``threading.Condition`` are written in Python. A KeyboardInterrupt inside of them
can leave their lock taken, and the next thread that wants to wake another waits forever. To acquire or release a bare
lock is a single step.
"""

from __future__ import annotations

import threading


class Bell:
    """Wakes one waiting thread. A ring without a waiting thread ends the next `wait` at once; several count as one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()  # taken means: not rung. wait() takes it again, which resets the bell

    def ring(self) -> None:
        """Wake the waiting thread. From any thread."""
        try:  # noqa: SIM105 (called for each request: a context manager takes five times as long)
            self._lock.release()
        except RuntimeError:  # released already: it was rung, and nobody has waited since
            pass

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until somebody rings; return whether that happened in time."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)


class Latch:
    """A one-time event that any number of threads may wait for: ``threading.Event`` without `clear`."""

    __slots__ = ("_bells", "_is_set")

    def __init__(self) -> None:
        self._bells: list[Bell] = []  # one for each waiting thread; append and remove are single steps, so no lock
        self._is_set = False

    def is_set(self) -> bool:
        """Whether `set` has been called."""
        return self._is_set

    def set(self) -> None:
        """Let all waits return, now and later. From any thread."""
        self._is_set = True
        for bell in tuple(self._bells):  # a copy: waits that return remove theirs
            bell.ring()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until `set` is called; return whether it was."""
        if not self._is_set:
            bell = Bell()
            self._bells.append(bell)  # before the next look: a set() from now on rings it
            if not self._is_set:
                bell.wait(timeout_seconds)
            self._bells.remove(bell)
        return self._is_set
