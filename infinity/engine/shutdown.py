"""Ends threads and releases files with the engine: when it is closed, collected, or when the interpreter ends.

[Note: reaping]
An engine that nobody closed becomes garbage at any moment and on any thread: on one that it would have to join, or that has a
lock which it would have to take. So its finalizer only tells a thread that waits for that, and the thread shuts down.
Where weights are divided, other ranks may still fetch from this one (an export at the end of a function): that waits until all
ranks build another engine, or end.

[Note: order at exit]
Hooks of ``atexit`` run last in, first out. This module registers its hook when it is imported, which is when a script first
uses `infinity.initialize`. A save that a script registers later finds its engine open. The hook runs before the swapper's own,
which end the threads that an update writes with, and before the one that destroys process groups: those modules were imported
earlier.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import weakref

from infinity.engine.resources import EngineResources
from infinity.telemetry import Recording
from infinity.tiers.weight_exchange import WeightExchange
from infinity.updates.stream import UpdateStream
from swapper.sync.limits import start_threads

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
"""How long to wait for drives when nothing depends on them any more."""
_REAP_SECONDS = 10.0


class Shutdown:
    """Shuts an engine's background work down once, whichever occasion comes first.

    Attributes:
        is_over: It has been shut down by `now`.
    """

    def __init__(
        self,
        owner: object,
        stream: UpdateStream,
        storage: EngineResources,
        recording: Recording | None,
        exchange: WeightExchange,
    ) -> None:
        """``owner``: when it is garbage, the shutdown is due."""
        self._parts = _Parts(stream, storage, recording, exchange)
        self.is_over = False
        self._finalizer = weakref.finalize(owner, self._parts.tell)
        self._finalizer.atexit = False

    def now(self) -> None:
        """Shut down, unless that has happened. What an exception cuts off can be done again."""
        if not self.is_over:
            self._parts.end()
            self._finalizer.detach()
            self._parts.dismiss()
            self.is_over = True

    def hurry(self) -> None:
        """Nothing depends on the drives any more: whoever waits for one that hangs gets an error soon."""
        self._parts.hurry()


class _Parts:
    """What is to be shut down, and the thread that does it when the owner is garbage: see [Note: reaping]."""

    def __init__(
        self, stream: UpdateStream, storage: EngineResources, recording: Recording | None, exchange: WeightExchange
    ) -> None:
        self._stream = stream
        self._storage = storage
        self._recording = recording
        self._exchange = exchange
        self._pid = os.getpid()
        self._told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # to put something in is safe wherever one is
        self._thread = threading.Thread(target=self._reap, name="infinity-reaper", daemon=True)
        start_threads(self._thread)
        _open.append(self)

    def tell(self) -> None:
        """The owner is garbage. Takes no lock and waits for nothing."""
        _due.append(self)
        if not self._exchange.is_divided:
            self.reap()

    def reap(self) -> None:
        """What is garbage may be shut down."""
        self._told.put(True)

    def dismiss(self) -> None:
        """There is nothing to reap any more."""
        self._forget()
        self._told.put(False)
        self.settle()

    def hurry(self) -> None:
        """Wait no longer than a moment for drives."""
        if os.getpid() == self._pid:
            self._stream.stop()
            self._storage.give_up(_EXIT_SECONDS)

    def end(self) -> None:
        """Shut down. May be called again."""
        if os.getpid() == self._pid:  # a forked child has neither the threads nor the right to the files
            try:
                self._stream.close()
                self._storage.close()
            finally:
                if self._recording is not None:
                    self._recording.save_at_end()

    def settle(self) -> None:
        """Return when the thread has ended, or does not."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(_REAP_SECONDS)

    def end_at_exit(self) -> None:
        """The interpreter ends: what lies in scratch files goes with it, so a drive that hangs is not waited for.

        But ranks that still fetch the shares of this one are, unless an error ends it.
        """
        if os.getpid() == self._pid:
            self._exchange.leave()
        if self in _due:
            self.reap()
            self.settle()
        elif os.getpid() == self._pid:
            self.hurry()
            self.end()

    def _reap(self) -> None:
        if self._told.get():
            try:
                with self._storage.device.background():
                    self.hurry()
                    self.end()
            except Exception:
                logger.exception("an engine that nobody closed could not be shut down")
            finally:
                self._forget()
                _due.remove(self)

    def _forget(self) -> None:
        with contextlib.suppress(ValueError):
            _open.remove(self)


_open: list[_Parts] = []
"""What is not shut down, in the order of their beginnings."""
_due: list[_Parts] = []
"""What belongs to garbage and is not shut down yet."""


def settle() -> None:
    """Return when engines that became garbage have given back their space, their memory and their threads."""
    for parts in list(_due):
        parts.reap()
        parts.settle()


def end_all_at_exit() -> None:
    """The interpreter ends. An update that still computes while it goes down would abort the process.

    See [Note: order at exit].
    """
    with contextlib.ExitStack() as rest:
        for parts in list(_open):
            rest.callback(parts.end_at_exit)


atexit.register(end_all_at_exit)
