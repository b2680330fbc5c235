"""A backend that is held to a rate: never faster, hardly slower, and nothing lost."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import swapper.wrappers.rate_limit as rate_limit_module
from swapper import ALIGNMENT, ArgumentError, Swapper, SwapperConfig
from swapper.backend import Direction, IORequest
from swapper.backends.memory import MemoryBackend
from swapper.wrappers.rate_limit import RateLimitBackend
from tests.manual_backend import ManualBackend

_BLOCK = 64 << 10
_RATE = 64e6
_CAPACITY = 16 << 20


def _seconds_for(backend: RateLimitBackend, direction: Direction, num_requests: int, num_inflight: int) -> float:
    """Return how long requests take of which so many are always under way."""
    memory = np.zeros(_BLOCK, dtype=np.uint8)
    address = memory.__array_interface__["data"][0]
    room = threading.Semaphore(num_inflight)

    def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        assert (transferred_bytes, error) == (_BLOCK, None)
        room.release()

    started = time.monotonic()
    for _ in range(num_requests):
        room.acquire()
        backend.submit(IORequest(direction, 0, memory.data, address, complete))
    for _ in range(num_inflight):
        room.acquire()
    return time.monotonic() - started


class _Clock:
    """A time, and a delay line that moves it: from one moment at which something is due to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), function))

    def advance(self) -> None:
        self.now, _, function = heapq.heappop(self._due)
        function()

    def close(self) -> None:
        while self._due:
            self.advance()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    found = _Clock()
    monkeypatch.setattr(rate_limit_module, "time", found)
    monkeypatch.setattr(rate_limit_module, "DelayLine", lambda: found)
    return found


class _AtOnce(ManualBackend):
    """Takes no time."""

    def submit(self, request: IORequest) -> None:
        request.complete(len(request.memory), None)


def _clock_seconds_for(
    clock: _Clock, backend: RateLimitBackend, direction: Direction, num_requests: int, num_inflight: int
) -> float:
    """As `_seconds_for`, by the clock."""
    memory = np.zeros(_BLOCK, dtype=np.uint8)
    ended: list[int] = []

    def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        assert (transferred_bytes, error) == (_BLOCK, None)
        ended.append(1)

    started = clock.now
    for number in range(num_requests):
        while number - len(ended) >= num_inflight:
            clock.advance()
        backend.submit(IORequest(direction, 0, memory.data, memory.ctypes.data, complete))
    while len(ended) < num_requests:
        clock.advance()
    return clock.now - started


@pytest.mark.parametrize("num_inflight", [1, 8])
@pytest.mark.parametrize("direction", Direction)
def test_the_rate_is_kept(direction: Direction, num_inflight: int, clock: _Clock) -> None:
    backend = RateLimitBackend(_AtOnce(_CAPACITY), _RATE, _RATE)
    ideal = 200 * _BLOCK / _RATE
    assert 0.97 * ideal < _clock_seconds_for(clock, backend, direction, 200, num_inflight) <= ideal
    backend.close(10.0)


@pytest.mark.parametrize("num_inflight", [1, 8])
@pytest.mark.parametrize("direction", Direction)
def test_nothing_is_early(direction: Direction, num_inflight: int) -> None:
    """By the true clock, by which a busy machine may be late."""
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), _RATE, _RATE)
    assert _seconds_for(backend, direction, 200, num_inflight) > 0.96 * 200 * _BLOCK / _RATE
    backend.close(10.0)


def test_unused_time_is_not_saved_up() -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), _RATE, _RATE)
    _seconds_for(backend, Direction.READ, 1, 1)
    time.sleep(0.3)
    num_requests = 50
    assert _seconds_for(backend, Direction.READ, num_requests, 8) > 0.85 * num_requests * _BLOCK / _RATE
    backend.close(10.0)


def test_each_direction_has_a_rate_of_its_own(clock: _Clock) -> None:
    backend = RateLimitBackend(_AtOnce(_CAPACITY), write_bytes_per_second=_RATE)
    assert _clock_seconds_for(clock, backend, Direction.WRITE, 100, 4) > 0.9 * 100 * _BLOCK / _RATE
    assert _clock_seconds_for(clock, backend, Direction.READ, 100, 4) == 0
    backend.close(10.0)


def test_close_waits_for_nobodys_turn() -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 1), 1000.0, 1000.0)  # the first one would take four seconds
    ended: list[int] = []
    memory = bytearray(ALIGNMENT)
    array = np.frombuffer(memory, dtype=np.uint8)
    request = IORequest(
        Direction.WRITE, 0, array.data, array.__array_interface__["data"][0], lambda _, n, e: ended.append(n)
    )
    backend.submit(request)
    started = time.monotonic()
    is_ended = backend.close(10.0)
    assert is_ended
    assert ended == [ALIGNMENT]
    assert time.monotonic() - started < ALIGNMENT / 1000.0


def test_a_swapper_at_a_rate() -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), 1e9, 1e9)
    with Swapper(backend, SwapperConfig(request_bytes=_BLOCK)) as swapper:
        extent = swapper.allocate(4 << 20, "x")
        data = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)
        copy = np.empty_like(data)
        swapper.write(extent, data)
        swapper.read(extent, copy).wait()
        assert np.array_equal(data, copy)
        assert "RateLimitBackend(" in swapper.describe()
        assert "reads up to 1000 MB/s" in swapper.describe()


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_that_make_no_sense(rate: float) -> None:
    inner = MemoryBackend(ALIGNMENT)
    with pytest.raises(ArgumentError, match=f"write_bytes_per_second must be positive, got {rate}"):
        RateLimitBackend(inner, write_bytes_per_second=rate)
    inner.close(1.0)
