"""What ranks fetch from each other, each when it needs it: the others give it beside whatever they do.

Knows ranks, numbers and memory; must not know what is fetched.

[Note: pulls] An all-gather needs all ranks at the same point, and when a unit is fetched follows from time: from prefetches,
from what had to make room, from where a script's data leads a model. So whoever fetches asks, and two threads of each rank
answer, whatever its script does meanwhile:
  * One waits for requests; the other one sends, one answer after the other. The training thread only asks and waits.
  * A request ahead of need waits until the asked rank fetches the same thing for itself (`release`), so that it reads it once
    for all; one that somebody waits for (`Pull.promote`) is answered at once.
  * Each request has a tag of its own, so answers need no order. It begins with a head: empty, or why there is no answer.
An answer holds what its rank has at that moment. Who changes that sees to it that nobody asks meanwhile, see
``infinity.tiers.weight_exchange``.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from swapper import Latch
from swapper.sync.limits import start_threads

logger = logging.getLogger(__name__)

_REQUESTS = 1 << 24
"""The tag of requests; those of answers are the next ones."""
_NUM_TAGS = 1 << 20
_AHEAD, _NOW, _PROMOTED = range(3)
_HEAD_BYTES = 512
_MOST_FAILURES = 20
_PAUSE_SECONDS = 0.1
_SERVICE = "pulls"
_CURE = (
    "All ranks have to keep their engines open until the last one has done with it, and to close them at the same point"
)


class PullServer(Protocol):
    """Has something that other ranks ask for, by number. Called by the threads of `Pulls`."""

    def is_available(self, index: int) -> bool:
        """Whether it is in memory, or on its way there."""

    def serve(self, index: int) -> Sequence[torch.Tensor]:
        """It, in pieces (uint8, 1-D, on the CPU), which stay as they are until the next call."""


class _Request(NamedTuple):
    source: int
    kind: int
    number: int
    item: int
    tag: int


@dataclass
class _Awaited:
    """What one rank is to send for a pull."""

    rank: int
    head: torch.Tensor
    pieces: Sequence[torch.Tensor]
    """Held until all of it has come: gloo knows addresses only."""
    begun: list[Any]
    """Receives that nobody has waited for, in their order."""


@dataclass(eq=False)
class Pull:
    """Something that is on its way from other ranks."""

    _pulls: Pulls
    _what: str
    _request: tuple[int, int, int]
    _awaited: list[_Awaited]
    _is_promoted: bool

    def ask(self) -> None:
        """Tell the other ranks."""
        for each in self._awaited:
            for piece in (each.head, *each.pieces):
                each.begun.append(self._pulls.ranks.begin_receive(self._what, piece, each.rank, self._request[-1]))
            self._pulls.send(self._what, each.rank, _NOW if self._is_promoted else _AHEAD, *self._request)

    def promote(self) -> None:
        """Somebody waits for it. What goes wrong is raised by `wait`."""
        if not self._is_promoted and self._pulls.error_of(self._request[0]) is None:
            self._is_promoted = True
            try:
                for each in self._awaited:
                    self._pulls.send(self._what, each.rank, _PROMOTED, *self._request)
            except RankError as error:
                self._pulls.fail(self._request[0], error)

    def wait(self) -> None:
        """Return when all has come.

        Raises:
            RankError: another rank has ended, or cannot give it.
        """
        self.promote()
        before = self._pulls.error_of(self._request[0])
        if before is not None:
            raise before.with_traceback(None)
        try:
            while self._awaited:
                each = self._awaited[0]
                while each.begun:  # the head comes first
                    self._pulls.ranks.finish(self._what, each.begun[0])
                    each.begun.pop(0)
                    self._check(each)
                self._awaited.pop(0)
        except RankError as error:
            self._pulls.fail(self._request[0], error)  # some of it may come later, into memory that it keeps until then
            raise
        self._pulls.forget(self)

    def _check(self, each: _Awaited) -> None:
        text = bytes(each.head.numpy()).rstrip(b"\0").decode(errors="replace")
        if text:
            ranks = self._pulls.ranks
            problem = f"rank {ranks.members[each.rank]} cannot give its part: {text}"
            raise RankError(self._what, problem, rank=ranks.number, cure=_CURE)


class Pulls:
    """One for all that a process group's ranks fetch from each other; its threads begin with the first `PullServer`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._servers: dict[int, PullServer] = {}
        """By the number that all ranks know them by. Under the lock, as the next two."""
        self._waiting: dict[tuple[int, int], list[_Request]] = {}
        """Requests ahead of need, by number and index."""
        self._pending: set[Pull] = set()
        """What has not come: memory that gloo may write to must not go before."""
        self._tags = itertools.count()
        self._next_number = 0
        self._errors: dict[int, RankError] = {}
        """By number, what has made the ranks part."""
        self._ready: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._to_begin = [("asked", self._listen), ("giving", self._serve_all)]
        """Threads that have not been started."""

    def register(self, server: PullServer) -> int:
        """Answer requests from now on. All ranks call it at the same point. Returns the number to ask for."""
        found = self.ranks.all_gather_ints("making weights known to other ranks", [self._next_number])
        with self._lock:
            number = max(each[0] for each in found)
            self._next_number = number + 1
            self._servers[number] = server
            while self._to_begin:
                name, function = self._to_begin[-1]
                start_threads(threading.Thread(target=function, name=f"infinity-{name}", daemon=True))
                self._to_begin.pop()
        return number

    def unregister(self, number: int) -> None:
        """There is nothing any more under this number: whoever asks gets an error."""
        with self._lock:
            self._servers.pop(number, None)
            for key in [key for key in self._waiting if key[0] == number]:
                self.release(*key)

    def release(self, number: int, index: int) -> None:
        """It is at hand now: answer those who have asked ahead of need."""
        with self._lock:
            for request in self._waiting.pop((number, index), ()):
                self._ready.put(request)

    def pull(
        self, what: str, number: int, index: int, targets: Mapping[int, Sequence[torch.Tensor]], *, is_demand: bool
    ) -> Pull:
        """Ask for something. What goes wrong is raised by `Pull.wait`.

        Args:
            what: for messages.
            number, index: of which giver, and what of it.
            targets: of each rank that is asked, where its pieces go (uint8, 1-D, on the CPU).
            is_demand: somebody waits for it.
        """
        request = number, index, _REQUESTS + 1 + next(self._tags) % _NUM_TAGS
        heads = [torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu") for _ in targets]
        awaited = [_Awaited(rank, head, targets[rank], []) for rank, head in zip(targets, heads, strict=True)]
        pull = Pull(self, what, request, awaited, is_demand)
        if self.error_of(number) is None:
            with self._lock:
                self._pending.add(pull)
            try:
                pull.ask()
            except RankError as error:
                self.fail(number, error)
        return pull

    def send(self, what: str, rank: int, *numbers: int) -> None:
        """Send a request."""
        request = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.ranks.finish(what, self.ranks.begin_send(what, request, rank, _REQUESTS))

    def fail(self, number: int, error: RankError) -> None:
        """Nothing of this number can be fetched any more: parts of something may come when nobody expects them."""
        with self._lock:
            self._errors.setdefault(number, error)

    def error_of(self, number: int) -> RankError | None:
        """Why nothing of this number can be fetched any more."""
        with self._lock:
            return self._errors.get(number)

    def forget(self, pull: Pull) -> None:
        """It has come."""
        with self._lock:
            self._pending.discard(pull)

    # --------------------------------------------------------------------------------------------------------- answering

    def _listen(self) -> None:
        num_failures = 0
        while num_failures < _MOST_FAILURES:
            request = torch.zeros(4, dtype=torch.int64, device="cpu")
            try:
                begun = self.ranks.begin_receive("waiting for requests", request, None, _REQUESTS)
                self.ranks.finish("waiting for requests", begun, waits_forever=True)
            except RankError:  # one rank has ended; others may still ask
                num_failures += 1
                Latch().wait(_PAUSE_SECONDS)
                continue
            self._take(_Request(self.ranks.source_of(begun), *request.tolist()))

    def _take(self, request: _Request) -> None:
        key = request.number, request.item
        with self._lock:
            server = self._servers.get(request.number)
            if request.kind == _PROMOTED:
                asked = self._waiting.get(key, [])
                found = next((e for e in asked if (e.source, e.tag) == (request.source, request.tag)), None)
                if found is not None:
                    asked.remove(found)
                    self._ready.put(found)
            elif request.kind == _AHEAD and server is not None and not server.is_available(request.item):
                self._waiting.setdefault(key, []).append(request)
            else:
                self._ready.put(request)

    def _serve_all(self) -> None:
        while True:
            request = self._ready.get()
            try:
                self._serve(request)
            except RankError:
                logger.debug("rank %d does not take what it has asked for", request.source, exc_info=True)

    def _serve(self, request: _Request) -> None:
        what = f"giving rank {self.ranks.members[request.source]} what it has asked for"
        pieces: Sequence[torch.Tensor] = ()
        text = ""
        with self._lock:
            server = self._servers.get(request.number)
        try:
            if server is None:
                raise RankError(what, "the engine is closed here", rank=self.ranks.number, cure=_CURE)
            pieces = server.serve(request.item)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        raw = text.encode()[:_HEAD_BYTES]
        head[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else head[:0]
        self.ranks.sent_bytes["fetches"] += sum(piece.numel() for piece in pieces)
        begun = [self.ranks.begin_send(what, piece, request.source, request.tag) for piece in (head, *pieces)]
        for each in begun:
            self.ranks.finish(what, each)


def pulls_of(ranks: Ranks) -> Pulls:
    """Those of these ranks: one for all engines."""
    pulls = ranks.services.get(_SERVICE)
    if not isinstance(pulls, Pulls):
        pulls = ranks.services[_SERVICE] = Pulls(ranks)
    return pulls
