"""Ctrl-C, which has one rule: `uninterrupted` work is ended first, everything else is cut off at once.

[Note: interrupts]
Python raises KeyboardInterrupt on the main thread between any two calls. While states are half updated, or a transfer is being
handed to a drive, that would leave what nobody can put in order: there the main thread ends its work, waiting for the workers if
it has to, and then raises. Everywhere else it passes at once. Waits are cut off too: to acquire a lock lets signals through.
What an interrupt in a forward, a backward, a step or a save leaves behind is what any exception leaves there.
"""

from __future__ import annotations

import importlib
import os
import threading
from signal import SIGINT
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

_signal: Any = importlib.import_module("_signal")
"""What ``signal`` makes enums of, which takes several times as long."""

POLL_SECONDS = 1.0
"""How often a wait looks up, in case whoever was to wake it has gone."""


main = threading.main_thread().ident
"""The only thread that is interrupted."""


def _find_main() -> None:
    global main
    main = threading.main_thread().ident


os.register_at_fork(after_in_child=_find_main)


class uninterrupted:
    """Ctrl-C that comes inside the ``with`` block does what it does, raise KeyboardInterrupt as a rule, at its end."""

    _before: Any = None
    _came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if get_ident() == main:  # no other thread is interrupted
            handler = _signal.getsignal(SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), uninterrupted):
                self._before = handler
                _signal.signal(SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            if _signal.getsignal(SIGINT) == self._on_signal:  # else what was called inside has set another
                _signal.signal(SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)
