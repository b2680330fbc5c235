"""What Python code other threads run at this moment.

Knows threads and their frames; must not know turns, units or modules.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MOST_LOOKS = 1000

_lock = threading.RLock()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected inside, whose finalizers may let other threads run in the midst of what Python does.

    In Python 3.11, ``sys._current_frames`` may collect while it holds the lock of the list of threads (python/cpython#106883):
    then another thread waits for it for ever, as soon as it begins or ends a thread. And ``f_back`` may collect while it makes
    an object of a caller's frame, which is memory that is used again when the thread goes on: then the process dies.
    """
    with _lock:
        collects = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if collects:
                gc.enable()


def frames() -> dict[int, FrameType]:
    """The frame that each thread runs, by the thread's identifier."""
    with _without_collection():
        return sys._current_frames()


def is_alive(thread: int) -> bool:
    """Whether a thread has not ended."""
    return thread in frames()


def is_in(thread: int, code: object) -> bool:
    """Whether a function of which ``code`` is the code runs in a thread."""
    for _ in range(_MOST_LOOKS):
        with _without_collection():
            frame, is_generator = sys._current_frames().get(thread), False
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
