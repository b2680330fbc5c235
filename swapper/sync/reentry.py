"""Calls from code that came in between: signal handlers and finalizers.

[Note: coming in between]
A signal handler runs on the main thread between any two instructions; a finalizer (``__del__``, ``weakref.finalize``) does on
any thread, whenever the garbage collector comes. It may find this very thread with one of our locks, or half way through a
change. Locks are therefore of the kind that a thread can take twice, so that nobody waits for himself, and what is not safe in
the midst of a change is refused: set a flag, and act on it between steps. Our own finalizers only put work on a list.

Where such code came only into the user's own code, everything works. The stack tells: a handler is called with the frame that
it came into, which no ordinary call gets. It is looked at only where a call comes inside another one.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from types import FrameType
from typing import Any

from swapper.errors import ReentryError


def _folder_of_package(module: str) -> str:
    """The folder of the outermost package in which a module lies, wherever in it that is."""
    return os.path.dirname(os.path.abspath(str(sys.modules[module.partition(".")[0]].__file__))) + os.sep


_own: tuple[str, ...] = (_folder_of_package(__name__),)
_FINALIZER = weakref.finalize.__call__.__code__


def watch(module: str) -> None:
    """Code in the outermost package of this module (its ``__name__``) has states that nobody may come into, too."""
    global _own
    _own = (*_own, _folder_of_package(module))


def refuse_owned(lock: Any, what: str) -> None:
    """Raise if this thread has the lock already. The cheap way to know, for what is called often.

    Args:
        lock: A ``threading.RLock``.
        what: What was called.

    Raises:
        ReentryError: It has, so this is a signal handler or finalizer.
    """
    if lock._is_owned():
        raise ReentryError(what, "a change that is not complete")


def interrupted_frame() -> FrameType | None:
    """Return our frame on this thread's stack that a signal handler or finalizer came into, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    between: list[FrameType] = []  # of others, since the last frame of ours
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_own):
            between.append(frame)
        elif between:
            if any(map(_came_between, between)):
                return frame
            between.clear()
        frame = frame.f_back
    return None


def _came_between(frame: FrameType) -> bool:
    """Whether a function was not called by the one below it on the stack, but ran in the midst of it."""
    code = frame.f_code
    if code is _FINALIZER or code.co_name == "__del__":
        return True
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    if not code.co_flags & inspect.CO_OPTIMIZED or (code.co_argcount < 2 and not has_more):
        return False
    values = frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if has_more:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    if isinstance(values, dict):
        values.clear()  # a copy, before Python 3.13, that would keep tensors alive until the function ends
    return any(argument is frame.f_back for argument in arguments)
