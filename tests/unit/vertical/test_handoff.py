"""Functions that run in turns with the training thread, and end when nobody waits for them."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator

import pytest

from infinity.vertical.microbatch import Abandoned, MicroBatchThread

_SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("setting", default=0)


@pytest.fixture
def thread() -> Iterator[MicroBatchThread]:
    found = MicroBatchThread(0)
    yield found
    found.abandon()
    assert not found._thread.is_alive()


def test_functions_run_in_turns_one_after_the_other(thread: MicroBatchThread) -> None:
    seen: list[int | None] = []

    def function() -> None:
        seen.append(threading.get_ident())
        seen.append(_SETTING.get())
        thread.pause()
        seen.append(2)

    for setting in (5, 6):
        token = _SETTING.set(setting)
        thread.begin(function)
        _SETTING.reset(token)
        assert seen == [] and not thread.is_over
        thread.resume()
        assert seen == [thread._thread.ident, setting] and not thread.is_over
        thread.resume()
        assert seen.pop() == 2 and thread.is_over
        seen.clear()


@pytest.mark.parametrize("num_resumed", [0, 1])
def test_an_abandoned_function_ends_though_it_catches_everything(thread: MicroBatchThread, num_resumed: int) -> None:
    seen: list[BaseException] = []

    def function() -> None:
        for _ in range(3):
            try:
                thread.pause()
            except BaseException as error:
                seen.append(error)

    thread.begin(function)
    for _ in range(num_resumed):
        thread.resume()
    thread.abandon()
    assert not thread._thread.is_alive()
    assert [type(error) for error in seen] == [Abandoned] * 3 * num_resumed


def test_a_function_that_nobody_waits_for_any_more_is_interrupted(thread: MicroBatchThread) -> None:
    began = threading.Event()

    def function() -> None:
        began.set()
        while True:
            time.sleep(0.01)

    def wait() -> None:  # stands for a training thread that is interrupted
        with contextlib.suppress(Abandoned):
            thread.resume()

    thread.begin(function)
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(10)
    thread.abandon()
    waiting.join()
    assert not thread._thread.is_alive()
