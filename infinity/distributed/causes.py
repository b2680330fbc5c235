"""Why a rank has ended, told to the others: so that each of them names the first cause, and not what followed from it.

[Note: how a rank ends] A rank that ends closes its connections, so whoever waits for it, or comes to wait for it, gets an
error at once. What that error does not say is why:
  * An exception that nobody caught is written to the store before Python ends (`sys.excepthook`).
  * A thread of each rank writes every two seconds that it is there, and at what. Of one that is stopped, or cut off, nothing is
    heard any more, while one that computes for long goes on to write.
  * A rank that was killed (kill -9, out of memory) or stopped writes nothing. The ranks on its machine look at its process.
    They know all processes from the start, so this works without the store, which may have been in that process.
  * The store itself may be out of reach: its process has ended, or the network is cut. torch's client then waits as long as TCP
    does, a quarter of an hour and more. So each question to it has a limit, and after the first one that fails none is asked.
  * torchrun ends all others with SIGTERM within a tenth of a second, mostly before they have noticed anything. Where it is the
    launcher, and nobody else listens to that signal, this rank says first what is known, and ends as if it had not. (Python
    lets only the main thread listen: a script that calls `initialize` in another one goes without.) Where it is about to say
    so anyway, by an error, that is printed first: torch keeps all output to itself while it puts a traceback together.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from infinity.distributed.bounded import within
from infinity.errors import RankError
from swapper.errors import LimitError
from swapper.sync.limits import start_threads

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TIMEOUT_SECONDS = 2.0
"""How long to look for a cause: the system closes a process's connections a moment before the process is gone."""
_STORE_SECONDS = 5.0
"""How long the store may take for an answer."""
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 2.0
"""How often a rank says that it is there."""
_SILENT_SECONDS = 30.0
"""After how long without a word a rank, or the store, is given up."""
_NAP_SECONDS = 10.0
"""Between two looks: this process was stopped itself, and what it has not heard meanwhile tells nothing."""
_MOST_CHARACTERS = 2000


class Causes:
    """What is known of why ranks have ended: nothing, without a store.

    Attributes:
        place: What this rank exchanges, or has exchanged last.
        places: Of each group of ranks that this one's script meets: how many meetings it has been in, how many exchanges of
            other threads it has asked for, and what it has come to last.
    """

    def __init__(self, store: Any = None, prefix: str = "", index: int = 0, processes: Sequence[str] = ()) -> None:
        """
        Args:
            store: torch's, of the process group; None: there is none.
            prefix: of the names in it.
            index: this rank.
            processes: of each rank, its `own_process`.
        """
        self._store = store
        self._prefix = prefix
        self._index = index
        self._processes = processes
        self._pid = os.getpid()
        self._found: str | None = None
        self._is_store_lost = False
        self._is_printing = False  # the error that ends it
        self._is_to_end = False  # as soon as that is printed
        self.place = "beginning"
        self.places: dict[tuple[int, ...], tuple[int, int, str]] = {}
        self._heard: dict[int, tuple[str, float]] = {}
        """Of each other rank, what it has written last, and since when nothing new is known; of this one, of the store."""
        self._looked_at = -math.inf

    def listen(self) -> None:
        """From now on, tell the others what ends this rank, and say what ended them."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._is_printing = True
            try:
                self.publish(error)
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
        arguments = weakref.ref(self), os.getpid()
        start_threads(threading.Thread(target=_beat, args=arguments, name="infinity-beat", daemon=True))

    def on_exchange(self, what: str) -> None:
        """This rank begins to exchange something."""
        self.place = what

    def write_place(self, number: int) -> None:
        """Tell the others, for the ``number``-th time, that this rank is there."""
        places = [[*members, *of_script] for members, of_script in self.places.copy().items()]
        text = json.dumps([number, self.place[:_MOST_CHARACTERS], places])
        self._store.set(f"{self._prefix}/at{self._index}", text)

    def why_absent(self, members: Collection[int], issued: tuple[int, int] | None = None) -> str | None:
        """Why one of these ranks will not come, a sentence without its full stop; None if all may yet.

        To be called every few seconds. ``issued``: where this rank's script has asked for what is waited for, as in `places`.
        """
        if self._look(members) or self._store is None:
            return self._found
        now = time.monotonic()
        if now - self._looked_at > _NAP_SECONDS:
            self._heard.clear()
        self._looked_at = now
        others = [rank for rank in members if rank != self._index]
        found = self._ask(lambda: [self._read(f"at{rank}") for rank in others])
        for rank, at in zip(others, found, strict=True) if found is not None else [(self._index, "")]:
            elsewhere = _place_beyond(at, members, issued)
            if elsewhere is not None:
                return f"rank {rank} is at '{elsewhere}'"
            if rank not in self._heard or self._heard[rank][0] != at:
                self._heard[rank] = at, now
            elif now - self._heard[rank][1] > _SILENT_SECONDS:
                silent = f"rank {rank} has sent no sign of life for {_SILENT_SECONDS:.0f} s; its last exchange was"
                return self._stopped() or (
                    f"{silent} '{json.loads(at)[1] if at else ''}'" if found is not None else self.doubt[2:]
                )
        return None

    def _read(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def publish(self, error: BaseException) -> None:
        """This error ends the rank. What followed from another rank's end is no cause of its own."""
        if os.getpid() != self._pid:  # a forked child, whose end is no rank's
            return
        text = self._found if isinstance(error, RankError) else None
        text = text or f"rank {self._index} failed with {type(error).__name__}: {error}"
        self._ask(lambda: self._write(text[:_MOST_CHARACTERS]))

    def _write(self, cause: str) -> None:
        if self._store.add(f"{self._prefix}/num_causes", 1) == 1:
            self._store.set(f"{self._prefix}/cause", cause)

    def first(self) -> str | None:
        """What ended a rank first, a sentence without its full stop; None if nobody has said, nor can be seen to have ended.

        It takes no longer than ten seconds, whatever has become of the other ranks and of the network.
        """
        if self._store is None:  # nobody can have said it
            return None
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not self._look() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._found or self._stopped()

    def _look(self, members: Collection[int] | None = None) -> str | None:
        told = self._found or self._ask(lambda: self._read("cause"))
        ended = None if told else self.find_ended(members)
        # What ended of another rank's end has said so before: asked again, as it may have been since.
        self._found = told or (ended and (self._ask(lambda: self._read("cause")) or ended))
        return self._found

    @property
    def doubt(self) -> str:
        """What to add to `first`: why another rank may have said more than came here; empty if it cannot."""
        if not self._is_store_lost:
            return ""
        return (
            ". The process group's store does not answer: the network is cut, or the process that runs the store "
            "(rank 0, or the launcher) has ended or hangs"
        )

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None if it gives none, and from then on."""
        if self._store is None or self._is_store_lost:
            return None
        try:
            return within(_STORE_SECONDS, question)
        except (RuntimeError, ValueError, OSError, LimitError):  # its process has ended, or does not answer
            logger.debug("the store of the process group is lost", exc_info=True)
            self._is_store_lost = True
            return None

    def find_ended(self, members: Collection[int] | None = None) -> str | None:
        """Which rank's process (of ``members``), on this machine, does not exist any more; a sentence without its full stop."""
        for rank, pid, started in self._neighbours():
            if (members is None or rank in members) and _state(pid)[1] != started:
                return (
                    f"the process of rank {rank} ({pid}) has ended without giving a reason (see its output, or its "
                    "launcher's): an error, a kill, no memory left, or the end of its script"
                )
        return None

    def _stopped(self) -> str | None:
        for rank, pid, _ in self._neighbours():
            if _state(pid)[0] in ("T", "t"):
                return f"the process of rank {rank} ({pid}) is stopped, by a signal (SIGSTOP, SIGTSTP) or a debugger"
        return None

    def _neighbours(self) -> Iterator[tuple[int, int, str]]:
        """Of each other rank on this machine: its number, its process and when that began."""
        for rank, process in enumerate(self._processes):
            pid, host, started = process.split(" ", 2)
            if rank != self._index and host == _host():
                yield rank, int(pid), started

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._is_printing:
            self._is_to_end = True
            return
        if os.getpid() == self._pid:
            why = (self.first() or "no rank gave a reason; see the launcher's output") + self.doubt
            logger.error("rank %d is ended by its launcher (SIGTERM): %s", self._index, why)
        _end_by(number)


def _place_beyond(at: str, members: Collection[int], issued: tuple[int, int] | None) -> str | None:
    """Where a rank's script is, if it has come to a later meeting without asking for what was ``issued`` here."""
    if not at or issued is None:
        return None
    for *group, meetings, num_issued, what in json.loads(at)[2]:
        if group == list(members) and meetings > issued[0] and num_issued < issued[1]:
            return str(what)
    return None


def _beat(causes: weakref.ref[Causes], pid: int) -> None:
    """Say every few seconds that this rank is there, until nobody needs to know or the store does not answer."""
    number = 0
    while os.getpid() == pid and (present := causes()) is not None:
        try:
            present.write_place(number)
        except (RuntimeError, ValueError):
            return
        del present
        number += 1
        time.sleep(_BEAT_SECONDS)


def _end_by(number: int) -> None:
    """As if nobody listened to that signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def own_process() -> str:
    """This process, as other ranks know it: its number, its machine, and when it began."""
    return f"{os.getpid()} {_host()} {_state(os.getpid())[1]}"


def _host() -> str:
    """Of this machine, or of the container, in which numbers of processes mean something."""
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/pid').st_ino}"


def _state(pid: int) -> tuple[str, str]:
    """The letter of a process's state, and when it began, in ticks since the machine did; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if state in "ZX" else (state, fields[18])
