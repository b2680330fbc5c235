"""Why a rank has ended, told to the others: so that each of them names the first cause, and not what followed from it.

Knows the store in which the ranks of a process group have found each other; must not know what they do.

[Note: how a rank ends] A rank that ends closes its connections, so whoever waits for it, or comes to wait for it, gets an
error at once. What that error does not say is why:
  * An exception that nobody caught is written to the store before Python ends (`sys.excepthook`).
  * A rank that was killed (kill -9, out of memory) writes nothing. Those on its machine see that its process is gone.
  * torchrun ends all others with SIGTERM within a tenth of a second, mostly before they have noticed anything. Where it is the
    launcher, and nobody else listens to that signal, this rank says first what is known, and ends as if it had not. (Python
    lets only the main thread listen: a script that calls `initialize` in another one goes without.) Where it is about to say
    so anyway, by an error, that is printed first: torch keeps all output to itself while it puts a traceback together.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from infinity.errors import RankError

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0
"""How long to look for a cause: the system closes a process's connections a moment before the process is gone."""
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 2000


class Causes:
    """What is known of why ranks have ended.

    Attributes:
        has_told: An error ends this one.
    """

    def __init__(self, store: Any, prefix: str, index: int, num: int) -> None:
        """
        Args:
            store: torch's, of the process group.
            prefix: of the names in it.
            index, num: this rank, and how many there are.
        """
        self._store = store
        self._prefix = prefix
        self._index = index
        self._num = num
        self._pid = os.getpid()
        self._found: str | None = None
        self._is_printing = False  # the error that ends it
        self._is_to_end = False  # as soon as that is printed
        self.has_told = False
        self._store.set(f"{self._prefix}/process/{index}", f"{self._pid} {_host()} {_started(self._pid)}")

    def listen(self) -> None:
        """From now on, tell the others what ends this rank, and say what ended them."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._is_printing = True
            try:
                self.tell(error)
                before(kind, error, trace)
            finally:
                self._is_printing = False
            if self._is_to_end:
                _end_by(signal.SIGTERM)

        sys.excepthook = hook
        can_handle = threading.current_thread() is threading.main_thread()
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if can_handle and is_torchrun and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)

    def tell(self, error: BaseException) -> None:
        """This error ends the rank. What followed from another rank's end is no cause of its own."""
        if os.getpid() != self._pid:  # a forked child, whose end is no rank's
            return
        self.has_told = True
        text = self._found if isinstance(error, RankError) else None
        text = text or f"rank {self._index} failed with {type(error).__name__}: {error}"
        try:
            if self._store.add(f"{self._prefix}/num_causes", 1) == 1:
                self._store.set(f"{self._prefix}/cause", text[:_MOST_CHARACTERS])
        except RuntimeError:  # the store has ended with its process
            logger.debug("the store of the process group takes nothing any more", exc_info=True)

    def first(self) -> str | None:
        """What ended a rank first, a sentence without its full stop; None if nobody has said, nor can be seen to have ended."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._found is None and time.monotonic() < deadline:
            try:
                self._found = self._told() or self._gone()
            except (RuntimeError, ValueError):  # the store has ended
                break
            if self._found is None:
                time.sleep(_POLL_SECONDS)
        return self._found

    def _told(self) -> str | None:
        key = f"{self._prefix}/cause"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None

    def _gone(self) -> str | None:
        """Which rank's process, on this machine, does not exist any more."""
        for rank in range(self._num):
            key = f"{self._prefix}/process/{rank}"
            if rank == self._index or not self._store.check([key]):
                continue
            pid, host, started = self._store.get(key).decode().split(" ", 2)
            if host == _host() and _started(int(pid)) != started:
                return (
                    f"the process of rank {rank} ({pid}) is gone, and has not said why (see its output, or that of what "
                    "started it): an error, killed, out of memory, or at its end"
                )
        return None

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._is_printing:
            self._is_to_end = True
            return
        if os.getpid() == self._pid:
            why = self.first() or "no rank has said why; the launcher may"
            logger.error("rank %d is ended by its launcher (SIGTERM): %s", self._index, why)
        _end_by(number)


def _end_by(number: int) -> None:
    """As if nobody listened to that signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _host() -> str:
    """Of this machine, or of the container, in which numbers of processes mean something."""
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if there is none, or it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
