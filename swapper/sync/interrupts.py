"""Ctrl-C: `uninterrupted` work is completed first, everything else is cut off at once.

[Note: interrupts]
Python raises KeyboardInterrupt on the main thread, between any two bytecodes. In the middle of an update of states, or
of the submission of a transfer, that would leave a state that cannot be repaired. There the main thread completes its
work, waiting for workers if it must, and raises then. Elsewhere the interrupt raises at once. It also ends waits, since
acquiring a lock lets signals through. An interrupt in a forward, a backward, a step or a save has the effect of any
exception.
"""

from __future__ import annotations

import importlib
import os
import threading
from signal import SIGINT
from threading import get_ident
from types import FrameType
from typing import Any

# The C module under `signal`, whose functions wrap each result in an enum. That takes several times as long, and the
# main thread comes here with each read and write.
_signal: Any = importlib.import_module("_signal")

POLL_SECONDS = 1.0
"""How often a wait checks whether the thread that should wake it is gone, and lets Ctrl-C through."""


main = threading.main_thread().ident  # the only thread in which Python runs signal handlers
pid = os.getpid()  # kept, because requests look at it, and it is a system call


def _find_main() -> None:
    global main, pid  # in a forked child, the thread that called fork() is the main thread
    main, pid = threading.main_thread().ident, os.getpid()


os.register_at_fork(after_in_child=_find_main)


class uninterrupted:
    """A context manager that delays the handler of SIGINT, by default KeyboardInterrupt, to the end of its block."""

    _before: Any = None  # the handler that was set before
    _came: tuple[int, FrameType | None] | None = None  # arguments for it, if a signal came

    def __enter__(self) -> None:
        if get_ident() == main:  # no other thread is interrupted, or may set a handler
            handler = _signal.getsignal(SIGINT)
            # Not callable: SIG_IGN, SIG_DFL, or one that was set in C. A handler of ours: this block is inside another.
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), uninterrupted):
                self._before = handler
                _signal.signal(SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            if _signal.getsignal(SIGINT) == self._on_signal:  # else what was called inside has set another
                _signal.signal(SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)
