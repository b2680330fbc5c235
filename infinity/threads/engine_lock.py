"""The engine lock: one call at a time is inside an engine, from whatever thread.

[Note: engine lock]
A parameter's memory is the same for all threads, so one thread could free what another computes with. Therefore each
engine takes one call at a time: a whole forward, a backward, a method of the engine, a block of gathered weights, or
one operation on a parameter outside of those. If another thread calls meanwhile, it gets `EngineBusyError` at once;
nobody waits. Between calls the lock is free, between a forward and its backward as well, and any thread may call.

    main     forward ---.        backward ---.  step ---.
    thread       clone  |  clone             |          |  generate ----
                 busy   |  works                        |  works

A call holds the lock for its thread, and for threads that work for it: autograd's own threads, which run the backward
(``loss.backward()`` on a GPU included), and the micro-batch threads of a vertical step (`joined`). If a
KeyboardInterrupt cuts off a forward, the lock stays taken, because torch runs no hook then. The thread's next forward
takes it over, and `engine.reset()` on any thread frees it.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

from infinity.errors import EngineBusyError, EngineClosedError
from infinity.torch_internals.names import backward_number, in_backward, is_autograds_thread, no_override
from swapper.sync.lifetimes import LiveObjects
from swapper.sync.reentry import interrupted_frame, watch

_Method = TypeVar("_Method", bound=Callable[..., Any])

# `interrupted_frame` then knows this package's frames: a signal handler that came into one is refused.
watch(__name__)


class _Inside(threading.local):
    """The calling thread's part in calls of all engines."""

    # A frozenset as the class's default: threads that never call an engine need no set of their own.
    calls: frozenset[object] | set[object] = frozenset()
    """Keys (`EngineLock._key`) of the locks whose call the thread runs or works for."""
    # What `guard` returns on this thread: `no_override` inside a call, else the class's default.
    torch_function: Any = None


_inside = _Inside()


def is_inside() -> bool:
    """Whether the calling thread runs a call of some engine, so that it may compute with bound weights."""
    return bool(_inside.calls)


def _enter(thread_values: dict[str, Any], call: object) -> None:
    thread_values.setdefault("calls", set()).add(call)
    thread_values["torch_function"] = no_override


def _leave(thread_values: dict[str, Any], call: object) -> None:
    """Undo `_enter`. May be repeated, if an interrupt has cut off either."""
    # `get` and `discard`, which raise nothing if `_enter` did not get as far.
    calls = thread_values.get("calls", set())
    calls.discard(call)
    if not calls:
        # The class's defaults apply again: operations on bound weights go through `guard`'s function.
        thread_values.clear()


def guard(function: Callable[..., Any]) -> Any:
    """A ``__torch_function__`` for a class of bound weights: none for threads that are inside, ``function`` for others.

    torch looks it up for every operation, and swallows what is raised meanwhile, a KeyboardInterrupt too.
    """
    # A property gives each thread a value of its own. `partial(getattr, ...)` is C code, so that no line of Python runs
    # which an interrupt could come into.
    _Inside.torch_function = staticmethod(function)
    return property(functools.partial(getattr, _inside, "torch_function"))


def _end(held: list[dict[str, Any]], call: object) -> None:
    for thread_values in held:
        _leave(thread_values, call)
    held.clear()


class EngineLock:
    """Held by one call at a time: see [Note: engine lock].

    Attributes:
        owner: The thread whose call holds the lock; None without one, and while the lock is taken or freed.
        num_handovers: How often another thread than before has begun a call.
    """

    def __init__(self) -> None:
        # Two fields say who has the lock. `_taken` decides, atomically. `owner` is for the fast checks, and is set last
        # and cleared first. An interrupt in between leaves `_taken` set and `owner` None. Then the next `acquire`
        # repeats the rest.
        self._taken: dict[int, int] = {}
        """0 -> the thread that has the lock. ``dict.setdefault`` is atomic, and repeating it on the same thread is
        harmless."""
        self.owner: int | None = None
        self._call = ""
        self._depth = 0
        """Nested calls of the owner."""
        self._key = object()
        """Represents this lock in `_Inside.calls`. The lock itself would live as long as the thread there."""
        self._held: list[dict[str, Any]] = []
        """The owner's `_Inside`, since another thread may end the call (`reset`)."""
        self._backward_of_owner = -1
        """The number of the backward for which one of autograd's threads holds the lock; -1 if none does."""
        self._members: set[int] = set()
        self._last: int | None = None
        """The thread that began the last call, autograd's threads not counted."""
        self.num_handovers = 0
        self._is_forked = False
        _locks.add(self)
        # Without it, a dropped engine whose call an interrupt cut off would leave its thread marked as inside for good.
        weakref.finalize(self, _end, self._held, self._key).atexit = False

    @property
    def is_mine(self) -> bool:
        """Whether the call that holds the lock is the calling thread's, or one that it works for."""
        me = get_ident()
        return self.owner == me or (self.owner is not None and self._works_for_owner(me))

    def _works_for_owner(self, me: int) -> bool:
        if me in self._members:
            return True
        # Autograd's device threads, and its pool for nested backwards, are no threads of Python. A backward that began
        # on one of them has a number, by which its other threads are known.
        return in_backward() and (is_autograds_thread() or self._backward_of_owner == backward_number())

    def acquire(self, call: str) -> None:
        """Begin a call on the calling thread. Calls nest; each needs a `release`.

        Args:
            call: its name, for messages.

        Raises:
            EngineBusyError: a call of another thread is inside.
            EngineClosedError: this is a forked child.
        """
        me = get_ident()
        if self.owner == me or (self.owner is not None and self._works_for_owner(me)):
            self._depth += 1
            return
        self.check_process(call)
        if self._backward_of_owner != -1 and self._last == me and not in_backward():
            self.break_off()  # it was a backward of this thread, which is not in it any more: an exception has cut it off
        # Whatever an interrupt cuts off from here on, or in `_free`: the lock has no owner then, so the next call of this
        # thread takes it once more, which does the rest. All of it may be done again.
        if self._taken.setdefault(0, me) != me:
            raise self._busy(call)
        self._held.append(vars(_inside))
        _enter(self._held[0], self._key)
        # `_last` is left alone here, because handovers count threads of the script.
        if in_backward() and is_autograds_thread():
            self._backward_of_owner = backward_number()  # by which the next call knows whether that backward still runs
        elif self._last != me:
            self._last = me
            self.num_handovers += 1
        # `owner` last: until here `is_mine` is False, and a second thread gets EngineBusyError by `_taken`.
        self._call, self._depth, self.owner = call, 1, me

    def release(self) -> None:
        """The counterpart of `acquire`."""
        if self._depth > 1:
            self._depth -= 1
        elif self._depth:
            self._free()

    def _free(self) -> None:
        # `owner` first: see `__init__`.
        self.owner, self._depth, self._backward_of_owner = None, 0, -1
        _end(self._held, self._key)
        self._taken.clear()

    def break_off(self) -> None:
        """End the call that holds the lock, if any: it was cut off."""
        if self._taken:
            self._free()

    @property
    def is_nested(self) -> bool:
        """Whether the present call is nested in another one of its thread."""
        return self._depth > 1

    def be_outermost(self) -> None:
        """Forget calls around the present one, which were cut off before their `release`."""
        if self.owner == get_ident():
            self._depth = 1

    def check(self, call: str) -> None:
        """Raise `EngineBusyError` unless `is_mine`."""
        if not self.is_mine:
            raise self._busy(call)

    def check_process(self, call: str) -> None:
        """Raise `EngineClosedError` if this is a forked child."""
        if self._is_forked:
            raise EngineClosedError.in_fork(call)

    def _busy(self, call: str) -> EngineBusyError:
        # `_taken` instead of `owner`, which is None while the lock is taken or freed.
        name = next((thread.name for thread in threading.enumerate() if thread.ident == self._taken.get(0)), "another")
        return EngineBusyError(
            call,
            f"a call of thread '{name}' is inside the engine ({self._call}), which takes one at a time",
            cure="Wait for that call in your own code (a threading.Lock, Thread.join), or give the other thread a "
            "copy of what it reads. If an exception or an interrupt has cut that call off, call engine.reset()",
        )

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Hold the lock for a call inside the ``with`` block: see `acquire`.

        Raises:
            EngineBusyError: another thread's call is inside; or a signal handler or finalizer calls, in the midst of a
                call.
        """
        me = get_ident()
        # Looking at the stack costs more than taking the lock. In a plain loop one thread calls again and again, with
        # no call inside, and its stack is not looked at.
        if self.owner == me or self._last != me:
            refuse_reentry(call)
        self.acquire(call)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside the ``with`` block, the calling thread works for the call that holds the lock."""
        me, thread_values = get_ident(), vars(_inside)
        try:
            self._members.add(me)
            _enter(thread_values, self._key)
            yield
        finally:
            _leave(thread_values, self._key)
            self._members.discard(me)

    def _reset_after_fork(self) -> None:
        """In a forked child: it has no other threads, and the weights are the parent's."""
        self._taken = {}
        self.owner, self._depth, self._backward_of_owner = None, 0, -1
        self._members.clear()
        self._is_forked = True


# Weak: locks of engines that exist, for the fork handler alone.
_locks: LiveObjects[EngineLock] = LiveObjects(in_child=EngineLock._reset_after_fork)
os.register_at_fork(after_in_child=lambda: vars(_inside).clear())


def locked(method: _Method) -> _Method:
    """Decorate a method of the engine, which holds ``self._coordinator.lock`` while it runs."""
    name = f"engine.{method.__name__}()"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._coordinator.lock.held(name):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def refuse_reentry(what: str) -> None:
    """Raise `EngineBusyError` in a signal handler or finalizer that interrupted the engine's own work on this
    thread."""
    frame = interrupted_frame()
    if frame is not None:
        raise EngineBusyError(
            what,
            "a signal handler or finalizer interrupted a call of the engine on this thread (in "
            f"{frame.f_code.co_qualname}), which has to finish first",
            cure="Set a flag in the handler, and save, flush or close between steps",
        )
