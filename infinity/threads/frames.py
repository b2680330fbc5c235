"""What Python code other threads run at this moment.

Knows threads and their frames; must not know turns, units or modules.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from types import FrameType

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MOST_LOOKS = 1000

_lock = threading.RLock()


def frames() -> dict[int, FrameType]:
    """The frame that each thread runs, by the thread's identifier.

    Without garbage collection: in Python 3.11, ``sys._current_frames`` may collect while it holds the lock of the list of
    threads (python/cpython#106883). A finalizer that lets another thread run meanwhile would wait for it for ever, as soon as
    that one begins or ends a thread.
    """
    with _lock:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def is_alive(thread: int) -> bool:
    """Whether a thread has not ended."""
    return thread in frames()


def is_in(thread: int, code: object) -> bool:
    """Whether a function of which ``code`` is the code runs in a thread."""
    for _ in range(_MOST_LOOKS):
        frame, is_generator = frames().get(thread), False
        while frame is not None:
            if frame.f_code is code:
                return True
            is_generator = bool(frame.f_code.co_flags & _GENERATORS)
            frame = frame.f_back
        if not is_generator:
            return False
        # The thread goes on meanwhile: a generator that has yielded since says no more who called it.
    return False


def position(thread: int) -> tuple[int, int] | None:
    """Changes while a thread's Python code goes on."""
    frame = frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti)


def _free_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_free_in_child)
