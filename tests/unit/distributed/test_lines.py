"""What processes of one machine tell each other, and what happens when one of them ends, hangs or forks."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from infinity.distributed.lines import Lines

_LONG = timedelta(seconds=500)
_SOON_SECONDS = 20.0


@pytest.fixture
def connect() -> Iterator[Callable[..., list[Lines]]]:
    """Makes lines between so many, all in this process."""
    made: list[Lines] = []

    def make(num: int, timeout: timedelta = _LONG) -> list[Lines]:
        all_lines = [Lines(timeout) for _ in range(num)]
        made.extend(all_lines)
        places = [lines.listen() for lines in all_lines]
        reached = [lines.connect(rank, places) for rank, lines in enumerate(all_lines)]
        for rank, lines in enumerate(all_lines):
            lines.accept([other for other in range(num) if reached[other][rank]])
        assert [sorted(lines) for lines in all_lines] == [[o for o in range(num) if o != r] for r in range(num)]
        return all_lines

    yield make
    for lines in made:
        lines.close()


def test_all_hear_what_all_tell(connect: Callable[..., list[Lines]]) -> None:
    all_lines = connect(4)
    found: dict[int, list[dict[int, bytes]]] = {}

    def tell(rank: int) -> None:
        found[rank] = [
            all_lines[rank].tell_all(bytes([rank]) * num, (lambda: None) if rank % 2 else None)
            for num in (1, 100, 100_000, 0, 5_000_000, 7)
        ]

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, came in found.items():
        assert came == [
            {other: bytes([other]) * num for other in range(4) if other != rank}
            for num in (1, 100, 100_000, 0, 5_000_000, 7)
        ]


def test_one_that_ends_is_heard_of_while_another_one_is_late(connect: Callable[..., list[Lines]]) -> None:
    for late in (1, 2):
        all_lines = connect(3)
        all_lines[3 - late].tell(0, b"the last")
        all_lines[3 - late].close()
        assert all_lines[0].hear([3 - late]) == {3 - late: b"the last"}
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            all_lines[0].hear([1, 2])
        with pytest.raises(OSError):
            all_lines[0].tell_all(b"somebody")
        assert time.monotonic() - began < _SOON_SECONDS


def test_one_that_does_not_come_is_waited_for_so_long(connect: Callable[..., list[Lines]]) -> None:
    lines, _ = connect(2, timedelta(seconds=0.3))
    calls: list[int] = []
    for meanwhile in (None, lambda: calls.append(1)):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="nothing came"):
            lines.hear([1], meanwhile)
        assert time.monotonic() - began >= 0.3
    assert len(calls) > 2


def test_what_is_done_meanwhile_is_done_until_it_comes(connect: Callable[..., list[Lines]]) -> None:
    first, second = connect(2)
    calls: list[int] = []

    def answer() -> None:
        calls.append(1)
        if len(calls) == 3:
            second.tell(0, b"now")

    assert first.hear([1], answer) == {1: b"now"}
    assert len(calls) == 3


def test_a_thread_that_waits_ends_with_its_own_lines(connect: Callable[..., list[Lines]]) -> None:
    lines, _ = connect(2)
    errors: list[type[BaseException]] = []

    def wait() -> None:
        try:
            lines.hear([1])
        except BaseException as error:
            errors.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    lines.close()
    thread.join(_SOON_SECONDS)
    assert errors == [ConnectionAbortedError]
    for use in (lambda: lines.tell(1, b"x"), lambda: lines.hear([1]), lambda: lines.tell_all(b"x")):
        with pytest.raises(ConnectionAbortedError, match="the process group has been destroyed"):
            use()


def test_a_forked_child_keeps_no_line_open(connect: Callable[..., list[Lines]]) -> None:
    first, second = connect(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        time.sleep(100)
        os._exit(0)
    try:
        second.tell(0, b"still here")  # the child has closed its own, and no other's
        assert first.hear([1]) == {1: b"still here"}
        second.leave()
        with pytest.raises(ConnectionResetError):
            first.hear([1])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
