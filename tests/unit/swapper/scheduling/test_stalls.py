"""Nothing waits for ever: hung transfers end in errors within their deadline, and harm nothing afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT, Extent, Priority, StallError, Swapper, SwapperClosedError, SwapperConfig, SwapperError
from swapper.backend import Direction
from swapper.backends.memory import MemoryBackend
from swapper.scheduling.waiting import TICKS_PER_DEADLINE
from tests.faults import FaultInjectingBackend, FaultRule
from tests.manual_backend import ManualBackend
from tests.ticking import LONG_SECONDS, ticking
from tests.waiting import wait_until

pytestmark = pytest.mark.off_main_thread

_BLOCK = ALIGNMENT
_CAPACITY = 64 * _BLOCK
# Time passes only while all that is under way hangs: what is only slow, because the machine is busy, is never late.
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=LONG_SECONDS)
_clocks: list[contextlib.ExitStack] = []
# A machine with more work than cores is slow, and only that: no test may fail for it.
_TIMEOUT_SECONDS = 20.0


@pytest.fixture(autouse=True)
def clocks_stop() -> Iterator[None]:
    yield
    while _clocks:
        _clocks.pop().close()


def _bytes(num_blocks: int = 1, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


def _opened(config: SwapperConfig = _CONFIG) -> tuple[Swapper, FaultInjectingBackend, Extent]:
    backend = FaultInjectingBackend(MemoryBackend(_CAPACITY, num_threads=2))
    swapper = Swapper(backend, config)
    if config.deadline_seconds == LONG_SECONDS:
        _clocks.append(contextlib.ExitStack())
        _clocks[-1].enter_context(ticking(backend, lambda: [swapper._scheduler]))
    extent = swapper.allocate(16 * _BLOCK, "layer 7")
    swapper.write(extent, _bytes(16)).wait()
    return swapper, backend, extent


def _close(swapper: Swapper, backend: FaultInjectingBackend) -> None:
    backend.clear()
    backend.release_hung()
    swapper.close()


@pytest.mark.parametrize("direction", Direction)
def test_a_hung_transfer_ends_its_wait_within_the_deadline(direction: Direction) -> None:
    swapper, backend, extent = _opened()
    backend.add(FaultRule(direction=direction, hangs=True, times=1))
    handle = getattr(swapper, direction.name.lower())(extent, _bytes(), offset=3 * _BLOCK)
    with pytest.raises(StallError) as caught:
        handle.wait()
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.offset, caught.value.num_bytes) == (3 * _BLOCK, _BLOCK)
    for part in (direction.name.lower(), "4096 bytes", "offset 12288", "host memory", "'layer 7'", "deadline_seconds"):
        assert part in str(caught.value)
    _close(swapper, backend)


def test_what_finds_the_backend_full_of_hung_transfers_is_told_so() -> None:
    config = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=LONG_SECONDS, max_inflight=2)
    swapper, backend, extent = _opened(config)
    other = swapper.allocate(2 * _BLOCK, "other")
    swapper.write(other, _bytes(2)).wait()
    backend.add(FaultRule(direction=Direction.READ, hangs=True, times=2))
    hung = [swapper.read(extent, _bytes(), offset=block * _BLOCK, priority=Priority.PREFETCH) for block in range(2)]
    started = time.monotonic()
    waiting = [swapper.read(other, _bytes()), swapper.read(other, _bytes(2))]
    behind = swapper.write(other, _bytes(2))
    for handle in waiting:
        with pytest.raises(StallError, match="is behind a transfer that hangs in host memory"):
            handle.wait()
    assert time.monotonic() - started < _TIMEOUT_SECONDS
    behind.wait()
    for handle in hung:
        with pytest.raises(StallError, match="saw no answer"):
            handle.wait()
    # Whatever comes later is told within the next tick, not after a deadline of its own.
    with pytest.raises(StallError, match="is behind a transfer that hangs in host memory"):
        swapper.read(other, _bytes()).wait()
    backend.clear()
    backend.release_hung()
    wait_until(lambda: swapper.statistics().inflight == 0)
    swapper.read(other, _bytes()).wait()
    swapper.close()


def test_flush_does_not_hang() -> None:
    swapper, backend, extent = _opened()
    backend.add(FaultRule(direction=Direction.WRITE, hangs=True, times=1))
    swapper.write(extent, _bytes())
    with pytest.raises(StallError):
        swapper.flush()
    swapper.flush()
    _close(swapper, backend)


def test_the_bytes_of_a_hung_write_are_out_of_use_until_it_is_over() -> None:
    swapper, backend, extent = _opened()
    backend.add(FaultRule(direction=Direction.WRITE, hangs=True, times=1))
    hung = swapper.write(extent, _bytes(2, 5))
    behind = swapper.read(extent, _bytes(), offset=_BLOCK)
    for handle in (hung, behind):
        with pytest.raises(StallError):
            handle.wait()
    # The old write may still reach the drive: a new one must not be overtaken by it.
    for attempt in (swapper.read, swapper.write):
        with pytest.raises(StallError, match="is behind a transfer that hangs"):
            attempt(extent, _bytes()).wait()
    swapper.read(extent, _bytes(), offset=2 * _BLOCK).wait()
    backend.release_hung()
    wait_until(lambda: not swapper._scheduler._active)
    swapper.write(extent, _bytes(2, 6)).wait()
    copy = _bytes(2, 0)
    swapper.read(extent, copy).wait()
    assert (copy == 6).all()
    swapper.close()


def test_what_a_stall_sets_free_is_started() -> None:
    """The third request waits for the second only, which fails because it waits for the first, which hangs."""
    swapper, backend, extent = _opened()
    backend.add(FaultRule(direction=Direction.WRITE, hangs=True, times=1))
    swapper.write(extent, _bytes(1))
    swapper._scheduler.pending.pop()
    behind = swapper.write(extent, _bytes(2))
    third = swapper.write(extent, _bytes(1, 9), offset=_BLOCK)
    wait_until(third.done)
    assert isinstance(behind.error, StallError) and third.error is None
    _close(swapper, backend)


def test_a_long_request_is_no_stall_while_its_pieces_come_through() -> None:
    backend = ManualBackend(_CAPACITY, concurrency=1)
    with Swapper(backend, _CONFIG) as swapper:
        handle = swapper.read(swapper.allocate(20 * _BLOCK, "x", is_prewritten=True), _bytes(20))
        for _ in range(20):
            _tick(swapper, TICKS_PER_DEADLINE - 1)
            backend.complete()
        handle.wait()


def test_a_request_behind_others_is_no_stall_while_they_come_through() -> None:
    backend = ManualBackend(_CAPACITY, concurrency=1)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(16 * _BLOCK, "x")
        for block in range(16):
            swapper.write(extent, _bytes(), offset=block * _BLOCK)
        for _ in range(16):
            _tick(swapper, TICKS_PER_DEADLINE - 1)
            backend.complete()
        swapper.flush()


def _tick(swapper: Swapper, num_ticks: int) -> None:
    for _ in range(num_ticks):
        swapper._scheduler._on_tick()


def test_close_with_a_hung_transfer_ends_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    swapper, backend, extent = _opened()
    backend.add(FaultRule(hangs=True))
    handles = [swapper.read(extent, _bytes(), offset=block * _BLOCK) for block in range(8)]
    errors: list[SwapperError] = []

    def wait() -> None:
        try:
            handles[7].wait()
        except SwapperError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started = time.monotonic()
    with caplog.at_level(logging.ERROR):
        swapper.close()
    thread.join(_TIMEOUT_SECONDS)
    assert time.monotonic() - started < _TIMEOUT_SECONDS
    assert all(handle.done() for handle in handles)
    assert [type(error) for error in errors] in ([SwapperClosedError], [StallError])
    assert "closed while transfers hang" in caplog.text
    backend.release_hung()  # completes into a closed scheduler, and must harm nobody


@pytest.mark.parametrize("blocked", Direction)
def test_neither_direction_starves_when_the_other_occupies_all_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: Direction
) -> None:
    name = "preadv" if blocked is Direction.READ else "pwritev"
    real = getattr(os, name)
    may_go = threading.Event()
    num_blocked = []

    def waiting(*arguments: object) -> int:
        num_blocked.append(1)
        may_go.wait(_TIMEOUT_SECONDS)
        return real(*arguments)

    with Swapper.open([tmp_path], _CAPACITY, SwapperConfig(num_threads=2, request_bytes=_BLOCK)) as swapper:
        extent = swapper.allocate(32 * _BLOCK, "x")
        swapper.write(extent, _bytes(32)).wait()
        monkeypatch.setattr(os, name, waiting)
        slow = [getattr(swapper, blocked.name.lower())(extent, _bytes(), offset=i * _BLOCK) for i in range(16)]
        wait_until(lambda: len(num_blocked) == 2)
        other = swapper.write if blocked is Direction.READ else swapper.read
        for block in range(16, 32):
            other(extent, _bytes(), offset=block * _BLOCK).wait(_TIMEOUT_SECONDS)
        assert not any(handle.done() for handle in slow)
        may_go.set()
        for handle in slow:
            handle.wait()
