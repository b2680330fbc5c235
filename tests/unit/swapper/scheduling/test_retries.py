"""Transfers that are tried again: later and later, beside all others, and not after the deadline or the end."""

from __future__ import annotations

import errno
import itertools
import threading

import numpy as np
import pytest

import swapper.scheduling.retries as retries_module
from swapper import ALIGNMENT, Swapper, SwapperClosedError, SwapperConfig, TransferError
from swapper.scheduling.retries import delay_seconds
from swapper.scheduling.watchdog import TICKS_PER_DEADLINE
from tests.manual_backend import ManualBackend
from tests.waiting import wait_until

pytestmark = pytest.mark.off_main_thread

_CONFIG = SwapperConfig(request_bytes=ALIGNMENT, deadline_seconds=1000.0)


class _Clock:
    """Time passes when the test says so; the thread that waits is woken then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._changed = threading.Condition()
        monkeypatch.setattr(retries_module.time, "monotonic", lambda: self.now)
        clock = self

        class Bell:
            is_rung = False

            def ring(self) -> None:
                with clock._changed:
                    self.is_rung = True
                    clock._changed.notify_all()

            def wait(self, seconds: float) -> None:
                with clock._changed:
                    clock.pauses.append(seconds)
                    until = clock.now + seconds
                    clock._changed.wait_for(lambda: self.is_rung or clock.now >= until)
                    self.is_rung = False

        monkeypatch.setattr(retries_module, "Bell", Bell)

    def advance(self, seconds: float) -> None:
        with self._changed:
            self.now += seconds
            self._changed.notify_all()


def _bytes(num_blocks: int = 1) -> np.ndarray:
    return np.ones(num_blocks * ALIGNMENT, dtype=np.uint8)


def test_the_delay_doubles_and_is_bounded() -> None:
    delays = [delay_seconds(count, has_moved=False) for count in range(1, 12)]
    assert delays[0] > 0
    assert all(later == min(2 * earlier, max(delays)) for earlier, later in itertools.pairwise(delays))
    assert sum(delays[:8]) < 1 and max(delays) < 1
    assert delay_seconds(10**6, has_moved=False) == max(delays)
    assert delay_seconds(3, has_moved=True) == 0, "a signal, say: what has moved is not moved again"


def test_others_go_on_while_one_waits_for_its_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    backend = ManualBackend(64 * ALIGNMENT, concurrency=1)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * ALIGNMENT, "x")
        first = swapper.write(extent, _bytes())
        others = [swapper.write(extent, _bytes(), offset=block * ALIGNMENT) for block in range(1, 4)]
        backend.fail(errno.EAGAIN)
        backend.complete_all()
        assert all(other.done() for other in others) and not first.done()
        clock.advance(delay_seconds(1, has_moved=False))
        wait_until(lambda: bool(backend.open))
        backend.complete_all()
        first.wait()
        assert swapper.statistics().num_retries == 1


def test_each_attempt_waits_longer_and_the_last_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    backend = ManualBackend(64 * ALIGNMENT)
    with Swapper(backend, SwapperConfig(max_retries=4, deadline_seconds=1000.0)) as swapper:
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
        for attempt in range(1, 5):
            backend.fail(errno.EAGAIN)
            seconds = delay_seconds(attempt, has_moved=False)
            assert not backend.open
            clock.advance(seconds * 1.001)
            wait_until(lambda: bool(backend.open))
        backend.fail(errno.EAGAIN)
        with pytest.raises(TransferError, match="EAGAIN"):
            handle.wait()


def test_close_does_not_wait_for_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    _Clock(monkeypatch)  # which stands still
    backend = ManualBackend(64 * ALIGNMENT)
    swapper = Swapper(backend, _CONFIG)
    handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
    backend.fail(errno.EAGAIN)
    swapper.close()
    with pytest.raises(SwapperClosedError):
        handle.wait()
    assert not swapper._scheduler._active
    wait_until(lambda: not any(thread.name == "swapper-back-off" for thread in threading.enumerate()))


def test_there_is_no_attempt_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    backend = ManualBackend(64 * ALIGNMENT)
    with Swapper(backend, _CONFIG) as swapper:
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
        for _ in range(TICKS_PER_DEADLINE // 2):
            swapper._scheduler._on_tick()
        backend.fail(errno.EAGAIN)
        clock.advance(1.0)
        wait_until(lambda: bool(backend.open))
        for _ in range(TICKS_PER_DEADLINE // 2):
            assert not handle.done()
            swapper._scheduler._on_tick()
        assert "saw no answer" in str(handle.error), "both attempts together have the time of one"
        backend.complete_all()


def test_an_attempt_that_fails_after_the_deadline_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    _Clock(monkeypatch)
    backend = ManualBackend(64 * ALIGNMENT)
    with Swapper(backend, _CONFIG) as swapper:
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), _bytes())
        swapper._scheduler._tick += TICKS_PER_DEADLINE
        backend.fail(errno.EAGAIN)
        with pytest.raises(TransferError, match="EAGAIN"):
            handle.wait()
