"""Ends threads and releases files when an engine is closed or collected, or when the interpreter ends.

[Note: reaping]
An engine that nobody closed may become garbage on any thread at any moment. That thread may be one that the shutdown
joins, or hold a lock that it takes. So the finalizer only puts an order into a queue, and a thread that waits for it
shuts down.

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
from dataclasses import InitVar, dataclass

from infinity.engine.resources import EngineResources
from infinity.metrics.timeline import Timeline
from infinity.updates.stream import UpdateStream
from swapper.sync.limits import start_threads

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
"""How long to wait for drives when nothing depends on them any more."""
_REAP_SECONDS = 10.0
"""How long to wait for the reaper thread, which itself waits `_EXIT_SECONDS` for drives."""


@dataclass(eq=False)
class Shutdown:
    """Ends an engine's background work once: at `close`, as garbage or at exit, see [Note: reaping]."""

    owner: InitVar[object]
    """The engine; its collection starts the shutdown. No reference to it is kept here."""
    _stream: UpdateStream
    _storage: EngineResources
    _timeline: Timeline | None
    is_over = False
    """Whether `now` has shut it down."""

    def __post_init__(self, owner: object) -> None:
        self._pid = os.getpid()
        # SimpleQueue.put is reentrant, so a finalizer may call it on a thread that is inside `put`. True: shut down;
        # False: end the thread.
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name="infinity-reaper", daemon=True)
        start_threads(self._thread)
        _open.append(self)
        self._finalizer = weakref.finalize(owner, self._on_garbage)
        self._finalizer.atexit = False

    def now(self) -> None:
        """Shut down, once. If an exception cuts it off, it may be called again."""
        if not self.is_over:
            # If this is cut off by an exception, the finalizer and `_open` still know this engine, and try again.
            self._end()
            self._finalizer.detach()
            self._forget()
            self._orders.put(False)  # the thread that would shut down a collected engine ends
            self.join()
            self.is_over = True

    def abort(self) -> None:
        """Nothing depends on the drives any more: let waits for a drive that hangs end with an error soon."""
        # In a forked child, threads and files are the parent's.
        if os.getpid() == self._pid:
            self._stream.stop()
            self._storage.abort(_EXIT_SECONDS)

    def _on_garbage(self) -> None:
        """The finalizer of the owner. Takes no lock and waits for nothing."""
        _due.append(self)
        self.reap()

    def reap(self) -> None:
        """Let the reaper thread shut down."""
        self._orders.put(True)

    def _end(self) -> None:
        """Shut down. May be called again."""
        if os.getpid() == self._pid:  # a forked child has neither the threads nor the right to the files
            try:
                self._stream.close()
                self._storage.close()
            finally:
                if self._timeline is not None:
                    self._timeline.save_at_end()

    def join(self) -> None:
        """Wait for the reaper thread, at most `_REAP_SECONDS`."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(_REAP_SECONDS)

    def end_at_exit(self) -> None:
        """The interpreter ends, and scratch files with it, so drives that hang are not waited for."""
        if self in _due:
            self.reap()
            self.join()
        elif os.getpid() == self._pid:
            self.abort()
            self._end()

    def _reap(self) -> None:
        if self._orders.get():
            try:
                with self._storage.device.background_thread():
                    self.abort()
                    self._end()
            except Exception:
                logger.exception("an engine without a call of close() could not be shut down")
            finally:
                self._forget()
                _due.remove(self)

    def _forget(self) -> None:
        with contextlib.suppress(ValueError):
            _open.remove(self)


# Changed without a lock: append and remove are atomic, and `_reap` may run beside the training thread.
_open: list[Shutdown] = []
"""Shutdowns that have not run, oldest engine first."""
_due: list[Shutdown] = []
"""Those of collected engines that have not run."""


def wait_for_collected() -> None:
    """Wait until collected engines have released their space, memory and threads."""
    for shutdown in list(_due):
        shutdown.reap()
        shutdown.join()


def end_all_at_exit() -> None:
    """The interpreter ends. An update that still runs during its teardown would abort the process.

    See [Note: order at exit].
    """
    with contextlib.ExitStack() as rest:
        # ExitStack calls them in reverse, the newest engine first, each even if another one raises.
        for shutdown in list(_open):
            rest.callback(shutdown.end_at_exit)


atexit.register(end_all_at_exit)
