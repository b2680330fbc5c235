"""Whose turn it is: threads that use one model do so one after the other.

Knows threads; must not know units or modules.

[Note: turns]
Which memory a parameter is bound to is the same for all threads, and so is what moves in and out. A second thread could free
what the first computes with. So one thread at a time has its turn: for a whole forward, a backward, a call of the engine,
gathered weights, or one operation on a parameter outside of those. Others wait, first come, first served. Between a forward
and its backward nobody has a turn: weights are whole then, and may be read. But a lock alone would not do:
  * A forward may compute in threads of its own, and wait for them. So inside a forward, and while weights are gathered, others
    may call modules below the model itself and operate on parameters: they are its *guests*. What they use stays where it is
    until they have done with it, and no update begins before that (`be_alone`).
  * Autograd's own threads (backward on a GPU runs in one) and the lanes of a vertical step act for whoever has the turn, and he
    waits for them: they are his *deputies*.
  * Nobody may wait for ever. Who waits sees whether the other's Python code still moves; if not for a minute, and no drive is
    waited for, it is a `TurnError`. A thread that has ended has no turn, and one that was cut off (torch runs no hook after a
    KeyboardInterrupt, or any other exception that is no Exception) has none either as soon as it has left the function that it
    took it for. The next one first cleans up after it (`TurnRules.lose_thread`).

    seconds       0.0     0.2       0.4       0.5            1.0                          1.5
    A    begins a forward  --------------------------------- changes weights: be_alone .. alone; end
    G                     guest: a module of it ----------------------------------------- end
    C                               engine.step(): waits ................................ begins
    D                                         `lent`: a deputy of A, computes

What must hold: a thread that takes part, as owner, guest or deputy, computes with open parameters as with any, and from all
others, D before it was lent the turn, they are guarded (`trusts`), so that nobody reads memory that is about to serve
something else. Who waits takes no lock that who has the turn may need, and touches nothing of the model: looking for newly
compiled blocks before the turn once took away the hooks that a vertical step beside it needed to end its calls.
After a fork no other thread is there: the child has no turn to wait for, and may not use the parent's memory (`ForkedError`).
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, Protocol

from infinity.errors import ForkedError, TurnError
from infinity.threads.frames import is_alive, is_in, position
from infinity.threads.interrupts import refuse_in_between
from infinity.torch_internals.names import backward_number, no_override
from swapper.sync.reentry import resting

PATIENCE_SECONDS = 60.0
"""How long to wait for a thread that does not move."""
_POLL_SECONDS = 0.2
_NATIVE = -1
"""Has the turn while autograd's own threads run a backward that nobody has announced; no thread has this number."""

_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


class _Part(threading.local):
    """Whether the present thread takes part in a turn of some engine."""

    turns: frozenset[int] = frozenset()
    """By identity; of those that are lent to it, another one each time."""
    torch_function: Any = None


_part = _Part()


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward."""
    return backward_number() != -1


def trusts() -> bool:
    """Whether the calling thread may compute with parameters that are open, without asking."""
    return bool(_part.turns)


def _trust(part: dict[str, Any], turn: int) -> None:
    """The thread that has ``part`` takes part in that turn from now on; once more changes nothing."""
    part["turns"] = part.get("turns", frozenset()) | {turn}
    part["torch_function"] = no_override


def _distrust(part: dict[str, Any], turn: int) -> None:
    """Not any more, if it did. Any thread may call it."""
    left = part.get("turns", frozenset()) - {turn}
    if left:
        part["turns"] = left
    else:
        part.clear()


def guard(function: Callable[..., Any]) -> Any:
    """A ``__torch_function__`` for a class of open parameters: none for threads that take part, ``function`` for others.

    torch looks it up for every operation, and loses what is raised meanwhile, an interrupt too: so no line of Python runs.
    """
    _Part.torch_function = staticmethod(function)
    return property(functools.partial(getattr, _part, "torch_function"))


@dataclass(eq=False)
class _Ticket:
    """Stands for a thread that waits."""

    thread: int
    reads: bool


class _Share(NamedTuple):
    """What a thread has in a turn, its own or another's."""

    part: dict[str, Any]
    inside: CodeType | None
    """The code of the function that it lasts as long as; None: for what ends it in any case."""


def _end_shares(shares: dict[int, _Share], turn: int) -> None:
    """The turn is garbage, and may never have been ended."""
    for share in list(shares.values()):
        _distrust(share.part, turn)


class TurnRules(Protocol):
    """Whoever has turns taken: it knows what is done in them, and hears when one goes wrong."""

    def admits_guests(self) -> bool:
        """Whether others may take part now."""
        ...

    def has_whole_weights(self) -> bool:
        """Whether all weights belong to one step."""
        ...

    def is_waiting(self) -> bool:
        """Whether who has the turn waits for a drive or an update, which end by themselves."""
        ...

    def lose_thread(self) -> None:
        """The turn is taken from a thread that has ended or left, by the next one: what it was in is cut off."""
        ...

    def leave_to_parent(self) -> None:
        """This is a forked child, where memory of the parent's must not be touched."""
        ...


class Turn:
    """The turns of one model's engine."""

    def __init__(self, rules: TurnRules) -> None:
        self._rules = rules
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._owner: int | None = None
        self._what = ""
        self._depth = 0
        self._last = _NATIVE
        """The thread that had the turn before; where weights are of two steps, the one that left them so."""
        self._found_whole = True
        """Whether weights were of one step when the present turn began."""
        self._queue: list[_Ticket] = []
        self._guests: dict[int, int] = {}
        self._shares: dict[int, _Share] = {}
        """Of the owner and the guests."""
        self._deputies: set[int] = set()
        self._waiting: set[int] = set()
        self._num_moves = 0
        self._is_forked = False
        _turns.add(self)
        weakref.finalize(self, _end_shares, self._shares, id(self)).atexit = False

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn, or acts for the one that has it."""
        me = get_ident()
        return self._owner == me or (self._owner is not None and self._is_deputy(me))

    @property
    def is_guest(self) -> bool:
        """Whether the calling thread takes part in another's turn."""
        return bool(self._guests) and get_ident() in self._guests

    @property
    def is_guest_newly(self) -> bool:
        """Whether the calling thread is a guest, in the outermost of what it does as one."""
        return bool(self._guests) and self._guests.get(get_ident()) == 1

    @property
    def has_guests(self) -> bool:
        """Whether anybody takes part in another's turn."""
        return bool(self._guests)

    def has_guest(self, thread: int) -> bool:
        """Whether a thread takes part in another's turn."""
        return thread in self._guests

    def _is_deputy(self, thread: int) -> bool:
        if thread in self._deputies or (in_backward() and is_native(thread)):
            self._num_moves += 1
            return True
        return False

    def begin(self, what: str, *, reads: bool, joins: bool = False, inside: CodeType | None = None) -> bool:
        """The calling thread's turn begins, when nobody else has one. A thread that has it may begin as often as it ends.

        Args:
            what: it is for, for messages.
            reads: wait until all weights belong to one step, too, if it is another thread that is to see to that.
            joins: be a guest instead, if somebody has a turn and admits them.
            inside: the code of the function that it is for. When the thread has left that without `end`, it has no turn.

        Returns:
            Whether as a guest. Either way `end` ends it.

        Raises:
            TurnError: whoever has the turn does not move any more.
            ForkedError: this is a forked child.
        """
        self.check_process(what)
        me = get_ident()
        ticket = _Ticket(me, reads)
        try:
            # Before the lock, which is not fair: those who come and go would take it again and again.
            self._queue.append(ticket)
            with self._lock:
                return self._begin(ticket, what, joins=joins, inside=inside)
        finally:
            with self._lock:
                if ticket in self._queue:  # else an interrupt came before that
                    self._queue.remove(ticket)
                if self._owner is None:
                    self._changed.notify_all()

    def check_process(self, what: str) -> None:
        """Raise `ForkedError` if this is a forked child. ``what`` it would do, for the message."""
        if self._is_forked and self._owner != get_ident():
            raise ForkedError(what)

    def _begin(self, ticket: _Ticket, what: str, *, joins: bool, inside: CodeType | None) -> bool:
        me = ticket.thread
        if self._owner == me:
            self._depth += 1
            return False
        if me in self._guests and joins:
            self._guests[me] += 1
            return True
        if self._owner == _NATIVE and self._last == me and not in_backward():
            self._release()  # who is here is not in backward any more: it was cut off
        if self._owner is not None and self._is_deputy(me):
            self._depth += 1
            return False

        def is_due() -> bool:
            if self._owner is not None:
                return joins and self._rules.admits_guests()
            # First come, first served, but nobody waits for one that cannot begin yet.
            earlier = itertools.takewhile(lambda other: other is not ticket, list(self._queue))
            return self._may_begin(ticket) and not any(map(self._may_begin, earlier))

        self._wait(is_due, lambda: self._owner if self._owner is not None else self._last, what)
        if self._owner is not None:
            self._guests[me] = 1
        elif in_backward() and is_native(me):
            self._owner, self._what, self._depth = _NATIVE, what, 1
            return False
        else:
            is_whole = self._rules.has_whole_weights()
            self._owner, self._what, self._depth, self._found_whole = me, what, 1, is_whole
        self._shares[me] = share = _Share(vars(_part), inside)  # first: an interrupt may come in between
        _trust(share.part, id(self))
        return me in self._guests

    def _may_begin(self, ticket: _Ticket) -> bool:
        return not ticket.reads or self._last == ticket.thread or self._rules.has_whole_weights()

    def end(self) -> None:
        """The counterpart of `begin`."""
        if self._guests:
            me = get_ident()
            with self._lock:
                if me in self._guests and me != self._owner:
                    self._guests[me] -= 1
                    if not self._guests[me]:
                        self._dismiss(me)
                    return
        if self._depth > 1:
            self._depth -= 1
            return
        with self._lock:
            self._release()

    def be_outermost(self) -> None:
        """The present call of the calling thread is its only one: others were cut off before they came to `end`."""
        if self._owner == get_ident():
            self._depth = 1

    def _release(self) -> None:
        owner, self._owner, self._depth = self._owner, None, 0
        if owner is not None and owner != _NATIVE:
            if self._found_whole:  # else one that does not ask for whole weights has come in between
                self._last = owner
            self._dismiss(owner)
        self._changed.notify_all()

    def _dismiss(self, thread: int) -> None:
        """A thread takes part no more."""
        self._guests.pop(thread, None)
        share = self._shares.pop(thread, None)
        if share is not None:
            _distrust(share.part, id(self))
        self._changed.notify_all()

    @contextmanager
    def taken(self, what: str, *, reads: bool = False) -> Iterator[None]:
        """It is the calling thread's turn inside the ``with`` block. See `begin`."""
        self.begin(what, reads=reads)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The calling thread acts for the one that has the turn inside the ``with`` block."""
        me, part, loan = get_ident(), vars(_part), object()
        try:
            self._deputies.add(me)
            _trust(part, id(loan))
            yield
        finally:
            _distrust(part, id(loan))
            self._deputies.discard(me)

    def be_alone(self) -> None:
        """Weights are about to change: return when no guest computes with them.

        Raises:
            TurnError: one does not move any more.
        """
        if self._guests:
            with self._lock:
                self._wait(lambda: not self._guests, lambda: next(iter(self._guests)), "changing weights")

    def look_again(self) -> None:
        """What `TurnRules.admits_guests` says may have changed."""
        with self._lock:
            self._changed.notify_all()

    @resting
    def _wait(self, is_due: Callable[[], bool], on_whom: Callable[[], int], what: str) -> None:
        if is_due():
            return
        refuse_in_between(what)  # a finalizer, say, on the very thread that the one who has the turn is waiting for
        seen: Any = None
        since = time.monotonic()
        me = get_ident()
        self._waiting.add(me)
        try:
            while not is_due():
                thread = on_whom()
                if self._has_left(thread):
                    continue
                if self._owner is None and not is_alive(thread):
                    return  # nobody will make the weights whole
                mark = self._positions(thread), self._num_moves
                if mark != seen or self._rules.is_waiting():
                    seen, since = mark, time.monotonic()
                elif time.monotonic() - since > PATIENCE_SECONDS:
                    if self._owner is None:
                        return  # what was begun is not ended: whoever reads now is told so
                    call = self._what if thread == self._owner else "a forward of its own"
                    raise TurnError(what, thread=_name(thread), call_of_other=call)
                self._changed.wait(_POLL_SECONDS)
        finally:
            self._waiting.discard(me)

    def _positions(self, thread: int) -> list[tuple[int, int] | None]:
        """Changes while the Python code of a thread goes on, or of one that it may wait for. Who waits here stands still."""
        others = [thread, *self._deputies, *self._guests]
        return [position(other) for other in others if other not in self._waiting]

    def _has_left(self, thread: int) -> bool:
        """Whether a thread took part that has ended, or left what it did so for. It does not any more."""
        share = self._shares.get(thread)
        if share is None or (is_alive(thread) and (share.inside is None or is_in(thread, share.inside))):
            return False
        if thread != self._owner:
            self._dismiss(thread)
            return True
        if is_alive(thread) and self._depth != 1:
            return False
        # Nobody else may begin before what was cut off is put in order.
        me = get_ident()
        self._dismiss(thread)
        self._owner, self._depth = me, 1
        try:
            self._rules.lose_thread()
        finally:
            self._owner, self._depth, self._last = None, 0, thread
            self._changed.notify_all()
        return True

    def _forget(self) -> None:
        """This is a forked child: no other thread is there, and the memory of the parent's is not."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_forked = True
        self._owner, self._depth = None, 0
        self._queue.clear()
        self._guests.clear()
        self._shares.clear()
        self._deputies.clear()
        self._waiting.clear()
        self._rules.leave_to_parent()


def take_turns(kind: type, *, reading: Sequence[str], others: Sequence[str]) -> None:
    """These methods are called in their thread's turn from now on, that of ``self._pager.turn``.

    ``reading``: those that need all weights to belong to one step.
    """
    for names, reads in ((reading, True), (others, False)):
        for name in names:
            setattr(kind, name, _in_turn(getattr(kind, name), reads=reads))


def _in_turn(method: Callable[..., Any], *, reads: bool) -> Callable[..., Any]:
    name = f"engine.{method.__name__}()"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn: Turn = self._pager.turn
        turn.begin(name, reads=reads)
        try:
            return method(self, *args, **kwargs)
        finally:
            turn.end()

    return call


def _thread(ident: int) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)


def is_native(ident: int) -> bool:
    """Whether a thread was not made by Python, as autograd's are not."""
    thread = _thread(ident)
    return thread is None or isinstance(thread, threading._DummyThread)


def _name(ident: int) -> str:
    thread = _thread(ident)
    return "another" if thread is None else thread.name


def _forget_all() -> None:
    vars(_part).clear()
    for turn in list(_turns):
        turn._forget()


os.register_at_fork(after_in_child=_forget_all)
