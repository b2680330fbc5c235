"""Ends threads and releases files with the engine: when it is closed, collected, or when the interpreter ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable

from infinity.storage import Storage
from infinity.telemetry import Recording
from infinity.update import UpdateStream

logger = logging.getLogger(__name__)


def finish_pending(flush: Callable[[], None]) -> None:
    """Let ``flush`` finish what is pending before an engine is closed. What fails then is logged: the states go anyway."""
    try:
        flush()
    except Exception:
        logger.warning("an update or write that was still pending failed while the engine was closed", exc_info=True)


class Shutdown:
    """Shuts an engine's background work down once, whichever occasion comes first.

    Attributes:
        is_over: It has been shut down by `now`.
    """

    def __init__(
        self, owner: object, stream: UpdateStream, storage: Storage, recording: Recording | None = None
    ) -> None:
        """``owner``: when it is garbage, the shutdown is due."""
        self._parts = stream, storage, recording, os.getpid()
        self.is_over = False
        self._finalizer = weakref.finalize(owner, _shut_down, *self._parts)
        # At exit it must come before the swapper's own hook, which ends the threads that the stream writes with; and an
        # update that still computes while the interpreter goes down would abort the process. Hooks run last in, first out.
        atexit.register(self._finalizer)

    def now(self) -> None:
        """Shut down, unless that has happened. What an exception cuts off can be done again."""
        if not self.is_over:
            _shut_down(*self._parts)
            atexit.unregister(self._finalizer)
            self._finalizer.detach()
            self.is_over = True


def _shut_down(stream: UpdateStream, storage: Storage, recording: Recording | None, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the threads nor the right to the files
        stream.close()
        storage.close()
        if recording is not None:
            recording.save_at_end()
