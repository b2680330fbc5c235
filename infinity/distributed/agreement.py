"""What several ranks do together, or one for all: it succeeds on all of them, or all of them raise.

`Ranks.all_gather_ints` says when ranks are elsewhere; this is for what fails on some of them. All ranks call each function here
with the same words, in the same order. Only exceptions are told: who is interrupted, or ends, is missed by the others at their
next meeting.

[Note: only data between ranks] Anybody in the network may connect to gloo, so what ranks send is plain data and is never
unpickled. An error is sent as the name of its class and what it holds. Only Python's and this package's classes are made again.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import swapper.errors
from infinity import errors
from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from infinity.numerics.plain_data import UNREADABLE, pack, unpack
from swapper import Latch
from swapper.sync.limits import start_threads

T = TypeVar("T")
PULSE_SECONDS = 1.0
"""How often the others hear of rank 0 while it works for them. Far less than a process group's timeout."""
_WAIT, _OVER = -1, -2
"""What rank 0 announces, besides tasks."""


def agree(ranks: Ranks, what: str, error: Exception | None = None) -> None:
    """Raise if this rank comes with an error, or another one does: the same error on all, that of the first rank which has one.

    Raises:
        Exception: as it was on that rank, if its class is Python's or this package's.
        RankError: it is of another class; or another rank has ended, does not come, or is elsewhere.
    """
    gather_results(ranks, what, lambda: _raise(error))


def gather_results(ranks: Ranks, what: str, function: Callable[[], T]) -> list[T]:
    """Call ``function`` on each rank, and return what it returned on each: plain data, see `infinity.numerics.plain_data`.

    Raises:
        Exception: what it raised on the first rank on which it failed, on all of them; see `agree`.
    """
    if ranks.num == 1:
        return [function()]
    found: T | None = None
    error: Exception | None = None
    try:
        found = function()
    except Exception as problem:
        error = problem
    try:
        of_ranks = ranks.gather(what, _packed(found, error))
    except RankError as problem:
        if error is not None:  # what went wrong first
            raise error from problem
        raise
    answers = [_unpacked(what, ranks, rank, data) for rank, data in enumerate(of_ranks)]
    for rank, (_, failure) in enumerate(answers):
        if failure is None:
            continue
        if rank == ranks.index and error is not None:
            raise error
        cause, name = _made_again(failure), ranks.members[rank]
        if cause is None:
            text = f"rank {name} failed: {failure['text']}"
            cause = RankError(what, text, rank=ranks.number, cure="See the output of that rank")
        cause.add_note(f"It failed on rank {name}, and this is rank {ranks.number}.")
        raise cause from error
    return [value for value, _ in answers]


def differing(ranks: Ranks, what: str, own: Mapping[str, str]) -> tuple[str, str] | None:
    """The first name whose text is not the same on all ranks, and what it is on each; None if all of them are."""
    of_ranks = gather_results(ranks, what, lambda: dict(own))
    for name in {name: None for of_rank in of_ranks for name in of_rank}:
        texts = [of_rank.get(name, "absent") for of_rank in of_ranks]
        if len({*texts}) > 1:
            pairs = zip(ranks.members, texts, strict=True)
            return name, ", ".join(f"{text} on rank {number}" for number, text in pairs)
    return None


def digest(described: Mapping[str, str]) -> int:
    """A checksum of texts by name: above 0, because 0 stands for none."""
    return 1 + zlib.crc32(repr(sorted(described.items())).encode())


def require_same(ranks: Ranks, what: str, own: Mapping[str, str], *, cure: str) -> None:
    """See that all ranks have the same texts under the same names. Usually that takes one integer.

    Raises:
        RankError: they have not; names the first that differs.
    """
    mine = digest(own)
    if any(found != [mine] for found in ranks.all_gather_ints(what, [mine])):
        found = differing(ranks, what, own)
        if found is not None:
            raise RankError(what, " is ".join(found), rank=ranks.number, cure=cure)


def on_rank_0(ranks: Ranks, what: str, function: Callable[[], Any]) -> None:
    """Call ``function`` on rank 0, while the others wait, however long that takes.

    Raises:
        Exception: what it raised, on all ranks; see `agree`.
    """
    if ranks.num == 1:
        function()
    else:
        Leader(ranks, f"{what}, which rank {ranks.members[0]} does").run(what, function)


class Leader:
    """Rank 0 works for all ranks. The others wait, however long that takes, and do what it announces meanwhile."""

    def __init__(self, ranks: Ranks, label: str) -> None:
        """``label``: of what is announced."""
        self._ranks = ranks
        self._label = label
        self._turn = threading.RLock()
        """On rank 0, held while ranks exchange something: by the thread that works, or the one that shows that it is alive."""
        self.is_leading = False

    def run(self, what: str, function: Callable[[], Any], do: Callable[..., None] = lambda *numbers: None) -> None:
        """Call ``function`` on rank 0, and ``do`` on the others with the numbers of each `announced`.

        Raises:
            Exception: what any of them raised, on all ranks; see `agree`.
        """
        self._ranks.all_gather_ints(what)
        agree(self._ranks, what, self._follow(do) if self._ranks.index else self._lead(function))

    @contextlib.contextmanager
    def announced(self, kind: int, first: int = 0, second: int = 0) -> Iterator[None]:
        """On rank 0: the others do what these numbers stand for (``kind`` is not negative). Inside the ``with`` block nothing
        else is announced."""
        with self._turn:
            self._ranks.all_gather_ints(self._label, [kind, first, second])
            yield

    def _lead(self, function: Callable[[], Any]) -> Exception | None:
        # Rank 0 may write to its drive for longer than the process group's timeout.
        is_over = Latch()
        problems: list[RankError] = []

        def beat() -> None:
            try:
                while not is_over.wait(PULSE_SECONDS):
                    with self.announced(_WAIT):
                        pass
            except RankError as problem:
                problems.append(problem)

        thread = threading.Thread(target=beat, name="infinity-pulse", daemon=True)
        error: Exception | None = None
        try:
            start_threads(thread)
            self.is_leading = True
            try:
                function()
            finally:
                self.is_leading = False
                is_over.set()
                thread.join()
        except Exception as problem:  # not an interrupt: the others miss who is interrupted, see above
            error = problem
        self._ranks.all_gather_ints(self._label, [_OVER, 0, 0])
        return error or next(iter(problems), None)

    def _follow(self, do: Callable[..., None]) -> Exception | None:
        error: Exception | None = None
        while (told := self._ranks.all_gather_ints(self._label, [_WAIT, 0, 0])[0])[0] != _OVER:
            try:
                if told[0] != _WAIT:
                    do(*told)
            except RankError:  # the process group has failed, so rank 0 cannot be told
                raise
            except Exception as problem:  # raised when rank 0 is ready, which may need this rank until then
                error = error or problem
        return error


def _raise(error: Exception | None) -> None:
    # As a function for `gather_results`, which raises on all ranks what it raises on one.
    if error is not None:
        raise error


def _packed(found: Any, error: Exception | None) -> bytes:
    if error is None:
        try:
            return pack([found, None], "the value that ranks exchange")
        except Exception as problem:  # the others wait for it
            error = problem
    cls, text = type(error), f"{type(error).__name__}: {error}"
    arguments = error.args
    if isinstance(error, OSError) and error.filename is not None:
        arguments = (*arguments[:2], error.filename)
    told = {"text": text, "module": cls.__module__, "name": cls.__name__, "args": [*arguments], "state": vars(error)}
    try:
        return pack([None, told], "the error")
    except Exception:  # whatever classes of others hold
        return pack([None, {"text": text}], "the error")


def _unpacked(what: str, ranks: Ranks, rank: int, data: bytes) -> tuple[Any, dict[str, Any] | None]:
    """What a rank returned, and what it told of its error."""
    try:
        value, failure = unpack(data)
        return value, None if failure is None else {"text": "", **failure}
    except UNREADABLE as error:
        problem = f"rank {ranks.members[rank]} sent what no rank of this version sends"
        cure = "Start all ranks with the same version, in a network that only they use"
        raise RankError(what, problem, rank=ranks.number, cure=cure) from error


def _made_again(told: dict[str, Any]) -> Exception | None:
    """The error; None if its class is neither Python's nor this package's."""
    module = {"builtins": builtins, "infinity.errors": errors, "swapper.errors": swapper.errors}.get(
        told.get("module", "")
    )
    cls = getattr(module, str(told.get("name")), None)
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return None
    try:
        # The constructors of this package's classes take facts, and not the message that they make of them.
        made: Exception = cls(*told["args"]) if module is builtins else cls.__new__(cls, *told["args"])
        state = {name: value for name, value in told["state"].items() if not hasattr(cls, name)}
        # The arguments as well: an OSError's own constructor sets none for a class that has another.
        for name, value in {**state, "args": tuple(told["args"])}.items():
            setattr(made, name, value)
        str(made)
    except Exception:  # of arguments that the class does not take
        return None
    return made
