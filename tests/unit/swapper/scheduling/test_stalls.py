"""Nothing waits for ever: hung transfers end in errors within their deadline, and harm nothing afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
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
# Time passes only when a test says so: what is only slow, because the machine is busy, is never late.
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=LONG_SECONDS)
# A machine with more work than cores is slow, and only that: no test may fail for it.
_TIMEOUT_SECONDS = 20.0
_BEHIND = "is behind a transfer that hangs in host memory"


def _bytes(num_blocks: int = 1, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


def _tick(swapper: Swapper, num_ticks: int = TICKS_PER_DEADLINE + 1) -> None:
    for _ in range(num_ticks):
        swapper._scheduler._on_tick()


@contextlib.contextmanager
def _opened(**settings: int) -> Iterator[tuple[Swapper, ManualBackend, Extent]]:
    """A swapper whose transfers hang until the test completes them, and an extent that is written."""
    backend = ManualBackend(_CAPACITY)
    with Swapper(backend, dataclasses.replace(_CONFIG, **settings)) as swapper:
        extent = swapper.allocate(16 * _BLOCK, "layer 7")
        swapper.write(extent, _bytes(16))
        backend.complete_all()
        yield swapper, backend, extent


@pytest.mark.parametrize("direction", Direction)
def test_a_hung_transfer_ends_its_wait_within_the_deadline(direction: Direction) -> None:
    with _opened() as (swapper, _, extent):
        handle = getattr(swapper, direction.name.lower())(extent, _bytes(), offset=3 * _BLOCK)
        _tick(swapper)
        with pytest.raises(StallError) as caught:
            handle.wait()
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.offset, caught.value.num_bytes) == (3 * _BLOCK, _BLOCK)
    for part in (direction.name.lower(), "4096 bytes", "offset 12288", "host memory", "'layer 7'", "deadline_seconds"):
        assert part in str(caught.value)


def test_what_finds_the_backend_full_of_hung_transfers_is_told_so() -> None:
    with _opened(max_inflight=2) as (swapper, backend, extent):
        hung = [swapper.read(extent, _bytes(), offset=block * _BLOCK, priority=Priority.PREFETCH) for block in range(2)]
        waiting = [swapper.read(extent, _bytes(num), offset=4 * _BLOCK) for num in (1, 2)]
        behind = swapper.write(extent, _bytes(2), offset=4 * _BLOCK)
        _tick(swapper)
        for handle in waiting:
            with pytest.raises(StallError, match=_BEHIND):
                handle.wait()
        for _ in range(2):
            backend.complete(2)
        behind.wait()
        for handle in hung:
            with pytest.raises(StallError, match="saw no answer"):
                handle.wait()
        # Whatever comes later is told within the next tick, not after a deadline of its own.
        later = swapper.read(extent, _bytes(), offset=4 * _BLOCK)
        _tick(swapper, 1)
        with pytest.raises(StallError, match=_BEHIND):
            later.wait()
        backend.complete_all()
        assert swapper.statistics().inflight == 0
        last = swapper.read(extent, _bytes(), offset=4 * _BLOCK)
        backend.complete_all()
        last.wait()


def test_flush_does_not_hang() -> None:
    with _opened() as (swapper, _, extent):
        swapper.write(extent, _bytes())
        timer = threading.Timer(0.05, _tick, (swapper,))
        timer.start()
        with pytest.raises(StallError):
            swapper.flush()
        timer.join()
        swapper.flush()


def test_the_bytes_of_a_hung_write_are_out_of_use_until_it_is_over() -> None:
    with _opened() as (swapper, backend, extent):
        hung = swapper.write(extent, _bytes(2, 5))
        backend.complete(1)
        behind = swapper.read(extent, _bytes(), offset=_BLOCK)
        _tick(swapper)
        for handle in (hung, behind):
            with pytest.raises(StallError):
                handle.wait()
        # The old write may still reach the drive: a new one must not be overtaken by it.
        for attempt in (swapper.read, swapper.write):
            handle = attempt(extent, _bytes())
            _tick(swapper, 1)
            with pytest.raises(StallError, match="is behind a transfer that hangs"):
                handle.wait()
        elsewhere = swapper.read(extent, _bytes(), offset=2 * _BLOCK)
        backend.complete(1)
        elsewhere.wait()
        backend.complete_all()
        assert not swapper._scheduler._active
        copy = _bytes(2, 0)
        swapper.write(extent, _bytes(2, 6))
        swapper.read(extent, copy)
        backend.complete_all()
        swapper.flush()
        assert (copy == 6).all()


def test_what_a_stall_sets_free_is_started() -> None:
    """The third request waits for the second only, which fails because it waits for the first, which hangs."""
    with _opened() as (swapper, backend, extent):
        swapper.write(extent, _bytes(1))
        behind = swapper.write(extent, _bytes(2))
        third = swapper.write(extent, _bytes(1, 9), offset=_BLOCK)
        _tick(swapper)
        backend.complete(1)
        assert isinstance(behind.error, StallError) and third.done() and third.error is None


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


def test_close_with_a_hung_transfer_ends_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    backend = FaultInjectingBackend(MemoryBackend(_CAPACITY, num_threads=2))
    swapper = Swapper(backend, _CONFIG)
    extent = swapper.allocate(16 * _BLOCK, "layer 7")
    swapper.write(extent, _bytes(16)).wait()
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
    with caplog.at_level(logging.ERROR), ticking(backend, lambda: [swapper._scheduler]):
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
