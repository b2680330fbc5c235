"""One thread of a rank that exchanges one thing after the other, whatever the rank's script does meanwhile.

[Note: the exchange's thread] One thread of each rank exchanges in an order that is the same on all, through process groups of
its own, whatever the script, or the engine's other threads, exchange meanwhile. A rank comes to an exchange when its script
has asked for it: the other ranks' threads wait for that, their scripts do not. The thread ends when the owner of the exchange
stops it, or is garbage-collected. After an error it exchanges nothing more: other ranks may still be in a collective.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from infinity.distributed.collectives import Ranks
from infinity.distributed.world import Numbered, subsets
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects
from swapper.sync.limits import start_threads


class Exchange(Protocol):
    """Something that is exchanged."""

    def run(self, ranks: Ranks) -> None:
        """Exchange it. What is raised ends all that comes after."""

    def finish(self, error: Exception | None) -> None:
        """It is over; ``error``: why it, or one before, has failed."""


class CollectiveThread:
    """See [Note: the exchange's thread]. All processes make it at the same point."""

    def __init__(
        self,
        purpose: str,
        main: Ranks,
        parts: Sequence[tuple[int, ...]],
        background_thread: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            purpose: names thread and process groups.
            main: those that exchange, as their scripts meet.
            parts: the numbers of all that do, those of each part of the model together.
            background_thread: what the thread works inside.
        """
        self._purpose = purpose
        self._numbered = Numbered()  # the next engine takes the process groups over
        self.main = main
        self.ranks = subsets(parts, f"{purpose} {self._numbered.number}")[main.members]
        self.background_thread = background_thread
        # No limit: entries are few, and nobody waits to put one.
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """What went wrong first; nothing is exchanged any more. Set by the thread."""

    def put(self, exchange: Exchange) -> None:
        """It is the next one, on all ranks. Returns at once."""
        if self._thread is None:  # started late: not all engines need it
            self._thread = threading.Thread(target=self._run, name=f"infinity-{self._purpose}", daemon=True)
            start_threads(self._thread)
            _open.add(self)
        self._queue.put(exchange)

    def stop(self) -> None:
        """End the thread, when it waits for nobody. Takes no lock."""
        self._queue.put(None)
        if self._thread is None:
            self._numbered.end()

    def end(self) -> None:
        """Return when the thread has ended, or waits for ranks for longer than a moment."""
        self.stop()
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        with self.background_thread():
            while self._do_next():  # keeps nothing of it
                pass
        if self.error is None:  # else one of them may be under way on other ranks
            self._numbered.end()

    def _do_next(self) -> bool:
        each = self._queue.get()
        if each is None:
            return False
        if self.error is None:
            try:
                each.run(self.ranks)
            except Exception as error:
                self.error = error
        each.finish(self.error)
        return True


# See [Note: how a group ends] in infinity.distributed.process_groups.
_open: LiveObjects[CollectiveThread] = LiveObjects(at_exit=CollectiveThread.end)
