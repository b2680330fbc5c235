"""Calls from code that came in between: signal handlers, finalizers, and whatever else Python runs between two steps.

[Note: coming in between]
A signal handler runs on the main thread between any two instructions; a finalizer (``__del__``, ``weakref.finalize``, a
callback of the garbage collector) does on any thread. It may find this very thread with one of our locks, or half way through
a change. Locks are therefore of the kind that a thread can take twice, so that nobody waits for himself, and what is not
safe in the midst of a change is refused in words. Where such code only came into the user's own code, everything works.

Nobody has to say where he is: the stack tells. A handler gets the frame that it came into as an argument, which no
ordinary call does. So this costs nothing but where it is asked.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

from swapper.errors import ReentryError


def _folder_of_package(module: str) -> str:
    """The folder of the outermost package in which a module lies, wherever in it that is."""
    return os.path.dirname(os.path.abspath(str(sys.modules[module.partition(".")[0]].__file__))) + os.sep


_OWN = [_folder_of_package(__name__)]
_BENEATH = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, numpy.__file__))
_PATHS = sysconfig.get_paths()
_LIBRARY = tuple({_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep, os.path.dirname(os.__file__) + os.sep})
_SITE = tuple({_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep})
_FINALIZER = weakref.finalize.__call__.__code__
_SIGNALS = tuple(map(int, signal.valid_signals()))
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal
"""What ``signal.getsignal`` makes enums of, which takes five times as long."""
_resting: set[CodeType] = set()
_kinds: dict[str, _Kind] = {}


class _Kind(Enum):
    OWN = "this package's"
    BENEATH = "what it calls: the standard library, torch, numpy"
    OTHER = "anybody else's"


_OTHER, _BENEATH_US = _Kind.OTHER, _Kind.BENEATH  # found faster than members


def watch(module: str) -> None:
    """Code in the outermost package of this module (its ``__name__``) has states that nobody may come into, too."""
    _OWN.append(_folder_of_package(module))
    _kinds.clear()


def resting(function: Any) -> Any:
    """Decorate what only waits, and whose callers in its package have left everything in order: who comes in may go on."""
    _resting.add(function.__code__)
    return function


def _kind_of(file: str) -> _Kind:
    kind = _kinds.get(file)
    if kind is None:
        kind = _kinds[file] = _find_kind(file)
    return kind


def _find_kind(file: str) -> _Kind:
    if file.startswith(tuple(_OWN)):
        return _Kind.OWN
    if file.startswith(("<", *_BENEATH)) or (file.startswith(_LIBRARY) and not file.startswith(_SITE)):
        return _Kind.BENEATH
    return _Kind.OTHER


def refuse_reentry(what: str) -> None:
    """Raise if a signal handler or finalizer calls this that came into the midst of our own work on this thread.

    Args:
        what: What was called.

    Raises:
        ReentryError: It did. Names the cure.
    """
    frame = interrupted_frame()
    if frame is not None:
        raise ReentryError(what, f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)})")


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
    top: FrameType | None = None  # the last frame of anybody else since ours, or the first that is beneath
    lowest: FrameType | None = None
    has_finalizer = False
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename) or _kind_of(code.co_filename)
        if code is _FINALIZER or code.co_name == "__del__":  # `_is_finalizer`, without a call for each frame
            has_finalizer = True
        if kind is _OTHER:
            top = lowest = frame
        elif kind is _BENEATH_US:
            top = top or frame
        else:
            if top is not None and any(map(_came_between, _down(top, frame))) and not _is_resting(frame):
                return frame
            top, lowest = None, frame
        frame = frame.f_back
    # A thread of ours cannot wait for itself, whatever it is doing.
    is_ours = lowest is not None and _kind_of(lowest.f_code.co_filename) is _Kind.OWN
    return lowest if has_finalizer and is_ours else None


def _down(top: FrameType, end: FrameType) -> Iterator[FrameType]:
    """Frames from the first to before the last."""
    frame: FrameType | None = top
    while frame is not None and frame is not end:
        yield frame
        frame = frame.f_back


def _is_finalizer(code: CodeType) -> bool:
    return code is _FINALIZER or code.co_name == "__del__"


def _is_resting(frame: FrameType) -> bool:
    """Whether the frame only waits, and so do all that called it up to the user's."""
    if frame.f_code not in _resting:
        return False
    package = next((own for own in _OWN if frame.f_code.co_filename.startswith(own)), "")
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename.startswith(package):
        above = above.f_back
    return above is None or _kind_of(above.f_code.co_filename) is _Kind.OTHER


def _came_between(frame: FrameType) -> bool:
    """Whether a function was not called by the one below it on the stack, but ran in the midst of it."""
    code = frame.f_code
    if _is_finalizer(code):
        return True
    if _kind_of(code.co_filename) is _Kind.BENEATH:
        return False
    if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
        return True
    if threading.get_ident() != threading.main_thread().ident:
        return False
    return _has_below_as_argument(frame) or code in _handlers()


def _has_below_as_argument(frame: FrameType) -> bool:
    """Whether a function was told into which frame it came, as a handler is, also one that is not installed any more."""
    code = frame.f_code
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


def _handlers() -> set[CodeType]:
    """The code of all signal handlers that are installed now."""
    found: set[CodeType] = set()
    for number in _SIGNALS:
        handler = _handler_of(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not isinstance(handler, int):
            function = (
                handler if hasattr(handler, "__code__") or hasattr(handler, "__func__") else type(handler).__call__
            )
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found


def came_from_between(error: BaseException) -> bool:
    """Whether a signal handler has raised this, wherever it came: what was going on then is neither done nor refused."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if _kind_of(frame.f_code.co_filename) is _Kind.OTHER and _has_below_as_argument(frame):
            return True
        trace = trace.tb_next
    return False
