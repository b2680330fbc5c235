"""A backend that is held to a rate: never faster, hardly slower, and nothing lost."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from swapper import ALIGNMENT, ArgumentError, Swapper, SwapperConfig
from swapper.backends import Direction, IORequest, MemoryBackend, RateLimitBackend

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


@pytest.mark.parametrize("num_inflight", [1, 8])
@pytest.mark.parametrize("direction", Direction)
def test_the_rate_is_kept(direction: Direction, num_inflight: int) -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), _RATE, _RATE)
    num_requests = 200
    ideal = num_requests * _BLOCK / _RATE
    ratios = []
    for _ in range(4):  # a busy machine may be late, never early
        ratios.append(_seconds_for(backend, direction, num_requests, num_inflight) / ideal)
        assert ratios[-1] > 0.96
        if ratios[-1] < 1.05:
            break
    assert min(ratios) < 4, ratios  # at all; how exactly, only an idle machine tells
    backend.close(10.0)


def test_unused_time_is_not_saved_up() -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), _RATE, _RATE)
    _seconds_for(backend, Direction.READ, 1, 1)
    time.sleep(0.3)
    num_requests = 50
    assert _seconds_for(backend, Direction.READ, num_requests, 8) > 0.85 * num_requests * _BLOCK / _RATE
    backend.close(10.0)


def test_each_direction_has_a_rate_of_its_own() -> None:
    backend = RateLimitBackend(MemoryBackend(_CAPACITY, 2), write_bytes_per_second=_RATE)
    reads = [_seconds_for(backend, Direction.READ, 100, 4) for _ in range(3)]
    assert min(reads) < _seconds_for(backend, Direction.WRITE, 100, 4)
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
