"""Tells the other ranks why a rank has ended, so that each of them names the first cause and not a consequence.

[Note: how a rank ends] A rank that ends closes its connections, so each rank that waits for it gets an error at once. That
error does not say why:
  * An exception that nobody caught is written to the store before Python ends (`sys.excepthook`).
  * A thread of each rank writes every two seconds that the rank lives, and what it exchanges. A rank that is stopped, or cut
    off, writes no more. A rank that computes for long goes on to write, unless that holds Python's lock: so only a rank of
    another machine counts as lost.
  * A rank that was killed (kill -9, out of memory) or stopped writes nothing. The ranks on its machine look at its process. All
    ranks know all processes from the start, so this works without the store, which may have been in that process.
  * The store itself may be out of reach: its process has ended, or the network is cut. torch's client then waits as long as TCP
    does, a quarter of an hour and more. So each request to it has a limit, and after the first failed one there are no more.
  * torchrun ends all other ranks with SIGTERM within a tenth of a second, mostly before they have noticed anything. Under
    torchrun, unless the script handles SIGTERM, this rank logs the cause first and then ends by the signal. (Python allows
    signal handlers in the main thread only: without them if a script calls `initialize` in another thread.) An error that is
    being printed is printed first: torch holds all output back while it formats a traceback.
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
"""How long to wait for an answer of the store."""
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 2.0
"""How often a rank writes that it lives."""
_SILENT_SECONDS = 30.0
"""After how long without a sign of life a rank, or the store, counts as lost."""
_NAP_SECONDS = 10.0
"""A longer pause between two looks means that this process was stopped itself: the others' silence is then no sign."""
_MOST_CHARACTERS = 2000


class Causes:
    """Finds out why ranks have ended, by way of the process group's store.

    Attributes:
        place: label of this rank's present or last exchange.
        places: for each set of ranks: number of meetings, number of requests to other threads, label of the last meeting.
    """

    def __init__(self, store: Any = None, prefix: str = "", index: int = 0, processes: Sequence[str] = ()) -> None:
        """
        Args:
            store: torch's, of the process group; None: there is none.
            prefix: of its keys.
            index: this rank.
            processes: each rank's `own_process`.
        """
        self._store = store
        self._prefix = prefix
        self._index = index
        self._processes = processes
        self._pid = os.getpid()
        self._found: str | None = None
        self._is_store_lost = False
        self._is_printing = False  # the traceback of the error that ends this rank
        self._is_to_end = False  # by SIGTERM, as soon as the traceback is printed
        self.place = "beginning"
        self.places: dict[tuple[int, ...], tuple[int, int, str]] = {}
        self._heard: dict[int, tuple[str, float]] = {}
        """Rank -> what it has written last, and when that was first seen. This rank: since when the store does not answer."""
        self._looked_at = -math.inf

    def listen(self) -> None:
        """Publish what ends this rank, from now on; under torchrun, log what ended another one."""
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
        """An exchange with this label begins."""
        self.place = what

    def write_place(self, number: int) -> None:
        """Write this rank's ``number``-th sign of life."""
        places = [[*members, *of_script] for members, of_script in self.places.copy().items()]
        text = json.dumps([number, self.place[:_MOST_CHARACTERS], places])
        self._store.set(f"{self._prefix}/at{self._index}", text)

    def why_absent(self, members: Collection[int], issued: tuple[int, int] | None = None) -> str | None:
        """Return why one of these ranks will not come, a sentence without its full stop; None if all may still come.

        To be called every few seconds. ``issued``: place in the script that requested the exchange, as in `places`.
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
                silent = f"{silent} '{json.loads(at)[1] if at else ''}'" if found is not None else self.doubt[2:]
                # A process on this machine is there: see `_look`. Something in it holds Python's lock, such as json.loads.
                is_there = rank in [neighbour for neighbour, *_ in self._neighbours()]
                if (why := self._stopped() or (None if is_there else silent)) is not None:
                    return why
        return None

    def _read(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def publish(self, error: BaseException) -> None:
        """Publish the error that ends this rank. A RankError only follows from another rank's end: that cause is published."""
        if os.getpid() != self._pid:  # a forked child, whose end is no rank's
            return
        text = self._found if isinstance(error, RankError) else None
        text = text or f"rank {self._index} failed with {type(error).__name__}: {error}"
        self._ask(lambda: self._write(text[:_MOST_CHARACTERS]))

    def _write(self, cause: str) -> None:
        if self._store.add(f"{self._prefix}/num_causes", 1) == 1:
            self._store.set(f"{self._prefix}/cause", cause)

    def first(self) -> str | None:
        """Return the cause that was published first, or a rank whose process has ended; None if there is neither.

        A sentence without its full stop. Takes at most ten seconds, whatever the state of the other ranks and the network.
        """
        if self._store is None:  # nothing can have been published
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
        """A sentence to add to `first` if the store is lost, so that a published cause may be missing; else empty."""
        if not self._is_store_lost:
            return ""
        return (
            ". The process group's store does not answer: the network is cut, or the process that runs the store "
            "(rank 0, or the launcher) has ended or hangs"
        )

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer; None if it does not answer, and at all later calls."""
        if self._store is None or self._is_store_lost:
            return None
        try:
            return within(_STORE_SECONDS, question)
        except (RuntimeError, ValueError, OSError, LimitError):  # its process has ended, or does not answer
            logger.debug("the store of the process group is lost", exc_info=True)
            self._is_store_lost = True
            return None

    def find_ended(self, members: Collection[int] | None = None) -> str | None:
        """Return which rank (of ``members``) on this machine has lost its process; a sentence without its full stop."""
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
        """Yield rank, process id and start time of the other ranks on this machine."""
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
    """Return the label of a rank's last meeting, if it is a later one and the rank has not requested what was ``issued`` here."""
    if not at or issued is None:
        return None
    for *group, meetings, num_issued, what in json.loads(at)[2]:
        if group == list(members) and meetings > issued[0] and num_issued < issued[1]:
            return str(what)
    return None


def _beat(causes: weakref.ref[Causes], pid: int) -> None:
    """Write signs of life until ``causes`` is garbage-collected or the store does not answer."""
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
    """End this process by the signal, without its handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def own_process() -> str:
    """Describe this process for other ranks: id, machine, and start time."""
    return f"{os.getpid()} {_host()} {_state(os.getpid())[1]}"


def _host() -> str:
    """Name the machine or container in which process ids are valid."""
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/pid').st_ino}"


def _state(pid: int) -> tuple[str, str]:
    """Return a process's state (a letter) and start time (in ticks since boot); empty strings if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if state in "ZX" else (state, fields[18])
