"""What has to be done for objects that own threads, files or memory when they go, when the process ends, and after a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

EXIT_SECONDS = 2.0
"""How long threads may take at the end of the process, which a drive that hangs must not keep."""


def call_when_collected(owner: object, function: Callable[..., object], *args: object) -> weakref.finalize[..., object]:
    """Call a function when nobody refers to ``owner`` any more; not at the end of the process, nor in a forked child."""
    finalizer = weakref.finalize(owner, _call_here, os.getpid(), function, *args)
    finalizer.atexit = False
    return finalizer


def _call_here(pid: int, function: Callable[..., object], *args: object) -> None:
    if os.getpid() == pid:
        function(*args)


class LiveObjects(Generic[_T]):
    """Knows objects as long as they live, without keeping them alive. A forked child forgets them.

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
            with contextlib.suppress(OSError):
                function(member)

    def _leave(self, in_child: Callable[[_T], object] | None) -> None:
        if in_child is not None:
            self._call_all(in_child)
        self._members.clear()
