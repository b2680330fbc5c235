"""What several ranks do together, or one for all: it succeeds on all of them, or all of them raise.

Knows ranks; must not know what is done. `Ranks.meet` says when ranks are elsewhere; this is for what fails on some of them.
All ranks call each function here with the same words, in the same order. Only exceptions are told: who is interrupted, or
ends, is missed by the others at their next meeting.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from swapper import Latch
from swapper.sync.limits import start_threads

T = TypeVar("T")
PULSE_SECONDS = 1.0
"""How often the others hear of rank 0 while it works for them. Far less than a process group's timeout."""


def agree(ranks: Ranks, what: str, error: Exception | None = None) -> None:
    """Raise if this rank comes with an error, or another one does: the same error on all, that of the first rank which has one.

    Raises:
        Exception: as it was on that rank, if it can be pickled.
        RankError: it cannot be; or another rank has ended, does not come, or is elsewhere.
    """
    together(ranks, what, lambda: _raise(error))


def together(ranks: Ranks, what: str, function: Callable[[], T]) -> list[T]:
    """Call ``function`` on each rank, and return what it returned on each, which is pickled.

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
    for rank, (is_error, data, text) in enumerate(map(pickle.loads, of_ranks)):
        if not is_error:
            continue
        if rank == ranks.index and error is not None:
            raise error
        cause, name = _unpacked(data), ranks.members[rank]
        if not isinstance(cause, Exception):
            cause = RankError(
                what, f"rank {name} failed: {text}", rank=ranks.number, cure="See the output of that rank"
            )
        cause.add_note(f"It failed on rank {name}, and this is rank {ranks.number}.")
        raise cause from error
    return [_unpacked(data) for _, data, _ in map(pickle.loads, of_ranks)]


def on_first(ranks: Ranks, what: str, function: Callable[[], Any]) -> None:
    """Call ``function`` on rank 0, while the others wait, however long that takes.

    Raises:
        Exception: what it raised, on all ranks; see `agree`.
    """
    if ranks.num == 1:
        function()
        return
    ranks.meet(what)
    error: Exception | None = None
    waiting = f"{what}, which rank {ranks.members[0]} does"
    if ranks.index:
        while not ranks.meet(waiting, [0])[0][0]:
            pass
    else:
        try:
            with pulse(lambda: ranks.meet(waiting, [0])):
                function()
        except Exception as problem:
            error = problem
        ranks.meet(waiting, [1])
    agree(ranks, what, error)


@contextlib.contextmanager
def pulse(beat: Callable[[], Any]) -> Iterator[None]:
    """Inside the ``with`` block another thread calls ``beat`` again and again, to tell other ranks that this one is there.

    This thread talks to nobody meanwhile, but where ``beat`` takes turns with it.

    Raises:
        RankError: as ``beat`` did, when the block is over.
    """
    is_over = Latch()
    problems: list[RankError] = []

    def run() -> None:
        try:
            while not is_over.wait(PULSE_SECONDS):
                beat()
        except RankError as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="infinity-pulse", daemon=True)
    start_threads(thread)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if problems:
        raise problems[0]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _packed(found: Any, error: Exception | None) -> bytes:
    if error is None:
        return pickle.dumps((False, pickle.dumps(found), ""))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # whatever classes of others raise
        data = b""
    return pickle.dumps((True, data, f"{type(error).__name__}: {error}"))


def _unpacked(data: bytes) -> Any:
    try:
        return pickle.loads(data) if data else None
    except Exception:  # a class that is not known here
        return None
