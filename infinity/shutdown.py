"""Ends threads and releases files with the engine: when it is closed, collected, or when the interpreter ends."""

from __future__ import annotations

import atexit
import os
import weakref

from infinity.storage import Storage
from infinity.telemetry import Recording
from infinity.update import UpdateStream


class Shutdown:
    """Shuts an engine's background work down once, whichever occasion comes first."""

    def __init__(
        self, owner: object, stream: UpdateStream, storage: Storage, recording: Recording | None = None
    ) -> None:
        """``owner``: when it is garbage, the shutdown is due."""
        self._finalizer = weakref.finalize(owner, _shut_down, stream, storage, recording, os.getpid())
        # At exit it must come before the swapper's own hook, which ends the threads that the stream writes with; and an
        # update that still computes while the interpreter goes down would abort the process. Hooks run last in, first out.
        atexit.register(self._finalizer)

    def now(self) -> None:
        """Shut down, unless that has happened."""
        atexit.unregister(self._finalizer)
        self._finalizer()


def _shut_down(stream: UpdateStream, storage: Storage, recording: Recording | None, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the threads nor the right to the files
        stream.close()
        storage.close()
        if recording is not None:
            recording.save_at_end()
