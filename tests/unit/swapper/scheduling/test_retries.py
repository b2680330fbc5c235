"""Transfers that are tried again: later and later, beside all others, and not after the deadline or the end."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from swapper import ALIGNMENT, Swapper, SwapperClosedError, SwapperConfig, TransferError
from swapper.scheduling.waiting import TICKS_PER_DEADLINE, delay_seconds
from tests.manual_backend import ManualBackend

pytestmark = pytest.mark.off_main_thread

_CONFIG = SwapperConfig(request_bytes=ALIGNMENT, deadline_seconds=1000.0)


class _Timer:
    """Its time comes when the test says so."""

    waiting: list[_Timer]

    def __init__(self, seconds: float, function: Callable[..., None], args: tuple[object, ...]) -> None:
        self.seconds, self._function, self._args = seconds, function, args

    def start(self) -> None:
        self.waiting.append(self)

    def cancel(self) -> None:
        self.waiting.remove(self)

    def ring(self) -> None:
        self.waiting.remove(self)
        self._function(*self._args)


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Timer]]:
    _Timer.waiting = []
    monkeypatch.setattr(threading, "Timer", _Timer)
    yield _Timer.waiting


def _bytes(num_blocks: int = 1) -> np.ndarray:
    return np.ones(num_blocks * ALIGNMENT, dtype=np.uint8)


def test_the_delay_doubles_and_is_bounded() -> None:
    delays = [delay_seconds(count, has_moved=False) for count in range(1, 12)]
    assert delays[0] > 0
    assert all(later == min(2 * earlier, max(delays)) for earlier, later in itertools.pairwise(delays))
    assert sum(delays[:8]) < 1 and max(delays) < 1
    assert delay_seconds(10**6, has_moved=False) == max(delays)
    assert delay_seconds(3, has_moved=True) == 0, "a signal, say: what has moved is not moved again"


def test_others_go_on_while_one_waits_for_its_next_attempt(timers: list[_Timer]) -> None:
    backend = ManualBackend(64 * ALIGNMENT, concurrency=1)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * ALIGNMENT, "x")
        first = swapper.write(extent, _bytes())
        others = [swapper.write(extent, _bytes(), offset=block * ALIGNMENT) for block in range(1, 4)]
        backend.fail(errno.EAGAIN)
        backend.complete_all()
        assert all(other.done() for other in others) and not first.done()
        timers[0].ring()
        backend.complete_all()
        first.wait()
        assert swapper.statistics().num_retries == 1


def test_without_a_thread_it_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: _Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_Timer, "start", refuse)
    backend = ManualBackend(64 * ALIGNMENT)
    with Swapper(backend, _CONFIG) as swapper:
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
        backend.fail(errno.EAGAIN)
        backend.complete_all()
        handle.wait()


def test_close_does_not_wait_for_the_next_attempt(timers: list[_Timer]) -> None:
    backend = ManualBackend(64 * ALIGNMENT)
    swapper = Swapper(backend, _CONFIG)
    handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
    backend.fail(errno.EAGAIN)
    (late,) = timers
    swapper.close()
    with pytest.raises(SwapperClosedError):
        handle.wait()
    assert not swapper._scheduler._active and not timers
    late._function(*late._args)  # it was just about to come
    assert not backend.open


def test_attempts_together_have_the_time_of_one(timers: list[_Timer]) -> None:
    backend = ManualBackend(64 * ALIGNMENT)
    with Swapper(backend, _CONFIG) as swapper:
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
        for _ in range(TICKS_PER_DEADLINE // 2):
            swapper._scheduler._on_tick()
        backend.fail(errno.EAGAIN)
        timers[0].ring()
        for _ in range(TICKS_PER_DEADLINE // 2):
            assert not handle.done()
            swapper._scheduler._on_tick()
        assert "saw no answer" in str(handle.error)
        backend.complete_all()
        late = swapper.write(swapper.allocate(ALIGNMENT, "y"), _bytes())
        swapper._scheduler._tick += TICKS_PER_DEADLINE
        backend.fail(errno.EAGAIN)
        with pytest.raises(TransferError, match="EAGAIN"):  # too late for another one
            late.wait()
