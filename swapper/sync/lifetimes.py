"""Cleanup of objects that own threads, files or memory: when they are collected, at exit, and after a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

EXIT_SECONDS = 2.0  # how long the process waits at exit for threads, which a hung drive may block


def call_when_collected(owner: object, function: Callable[..., object], *args: object) -> weakref.finalize[..., object]:
    """Call a function when ``owner`` is garbage-collected; not at the end of the process, nor in a forked child."""
    # `function` and `args` must not refer to `owner`: it would never be collected.
    finalizer = weakref.finalize(owner, _call_here, os.getpid(), function, *args)
    finalizer.atexit = False
    return finalizer


def _call_here(pid: int, function: Callable[..., object], *args: object) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the object, and not its threads
        function(*args)


class LiveObjects(Generic[_T]):
    """A weak set of objects. A forked child forgets them.

    Args:
        at_exit: Called with each that is left when the process ends.
        in_child: Called with each in a forked child.
    """

    def __init__(
        self, at_exit: Callable[[_T], object] | None = None, in_child: Callable[[_T], object] | None = None
    ) -> None:
        self._members: weakref.WeakSet[_T] = weakref.WeakSet()
        self.add = self._members.add
        self.discard = self._members.discard
        if at_exit is not None:
            atexit.register(self._call_all, at_exit)
        os.register_at_fork(after_in_child=lambda: self._leave(in_child))

    def _call_all(self, function: Callable[[_T], object]) -> None:
        for member in list(self._members):
            with contextlib.suppress(OSError):  # the others still have to be called
                function(member)

    def _leave(self, in_child: Callable[[_T], object] | None) -> None:
        if in_child is not None:
            self._call_all(in_child)
        self._members.clear()
