"""Ctrl-C: what must not be cut off is ended first, and then it passes; elsewhere it passes at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from swapper.sync.interrupts import uninterrupted


def _ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_it_comes_at_the_end_of_the_outermost_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                _ctrl_c()
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]
    with uninterrupted():
        pass


def test_it_comes_with_an_error_as_its_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        _ctrl_c()
        raise LookupError
    assert isinstance(caught.value.__context__, LookupError)


def test_handlers_of_others_are_called_and_stay() -> None:
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    with uninterrupted():
        _ctrl_c()
        assert not seen
    assert seen == [signal.SIGINT] and signal.signal(signal.SIGINT, before) is handler


def test_one_that_is_set_inside_stays() -> None:
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_other_threads_are_not_interrupted_anyway() -> None:
    entered: list[bool] = []

    def work() -> None:
        with uninterrupted():
            entered.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]
