"""Calls from signal handlers and finalizers in the middle of another call.

[Note: coming in between]
A signal handler runs on the main thread between any two bytecodes. A finalizer (``__del__``, ``weakref.finalize``) runs
on any thread, whenever the garbage collector does. The thread that it interrupts may hold one of our locks, in the
middle of a change. So our locks are re-entrant: with a plain lock, such a thread would wait for itself. Calls that
would spoil a change raise a `ReentryError`. Our own finalizers only queue work.

A handler that interrupts the user's own code may call everything. The stack shows the difference: Python passes a
handler the frame that it interrupted, which no ordinary call gets. The engine walks the stack only if a call comes
inside another one.
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
    """The folder of a module's outermost package."""
    return os.path.dirname(os.path.abspath(str(sys.modules[module.partition(".")[0]].__file__))) + os.sep


_own: tuple[str, ...] = (_folder_of_package(__name__),)  # frames of files in these folders are ours
_FINALIZER = weakref.finalize.__call__.__code__  # runs when a finalized object is collected


def watch(module: str) -> None:
    """Count frames of this module's outermost package as ours, too."""
    global _own
    _own = (*_own, _folder_of_package(module))


def refuse_owned(lock: Any, what: str) -> None:
    """Raise if this thread holds the lock already: see [Note: coming in between].

    Args:
        lock: A ``threading.RLock``.
        what: What was called.

    Raises:
        ReentryError: It has.
    """
    if lock._is_owned():  # of RLock in C, without documentation; threading.Condition uses it too
        raise ReentryError(what, "a change that is not complete")


def interrupted_frame() -> FrameType | None:
    """Return our frame on this thread's stack that a signal handler or finalizer interrupted, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    between: list[FrameType] = []  # of others, since the last frame of ours
    # From the innermost frame outwards. Example: lease() of ours < on_signal() of the user < step() of ours < the
    # script. When the walk is at step(), `between` is [on_signal], whose argument `frame` is step(): that one is
    # returned.
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
    # Without CO_OPTIMIZED it is a module or class body. A handler gets two arguments: the signal's number and the
    # frame.
    if not code.co_flags & inspect.CO_OPTIMIZED or (code.co_argcount < 2 and not has_more):
        return False
    values = frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if has_more:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    if isinstance(values, dict):
        values.clear()  # a copy, before Python 3.13, that would keep tensors alive until the function ends
    return any(argument is frame.f_back for argument in arguments)
