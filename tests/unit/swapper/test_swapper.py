"""The public face: extents, ranges, buffers, handles, closing."""

from __future__ import annotations

import doctest
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import swapper as package
from swapper import (
    ALIGNMENT,
    AlignedRegion,
    ArgumentError,
    ExtentError,
    Handle,
    StagingPool,
    Swapper,
    SwapperClosedError,
    SwapperConfig,
)
from swapper.backend import IOBackend, IORequest
from swapper.backends.memory import MemoryBackend
from swapper.wrappers.integrity import IntegrityBackend
from swapper.wrappers.versions import VersionedBackend

_CAPACITY = 8 << 20


@pytest.fixture(params=["drive", "memory", "inline"])
def swapper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swapper]:
    """The same behaviour on files, in memory with worker threads, and in memory on the caller's thread."""
    config = SwapperConfig(request_bytes=16 * ALIGNMENT, deadline_seconds=30.0)
    if request.param == "drive":
        made = Swapper.open([tmp_path], _CAPACITY, config)
    elif request.param == "memory":
        made = Swapper.in_memory(_CAPACITY, config)
    else:
        made = Swapper(MemoryBackend(_CAPACITY), config)
    with made:
        yield made


def test_the_documented_example() -> None:
    result = doctest.testmod(package)
    assert result.attempted >= 5
    assert result.failed == 0


class _Keeping(MemoryBackend):
    """Keeps what it has completed, as a thread does that is interrupted before it goes on to the next."""

    def __init__(self) -> None:
        super().__init__(_CAPACITY)
        self.kept: list[IORequest] = []

    def submit(self, request: IORequest) -> None:
        self.kept.append(request)
        super().submit(request)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda inner: inner,
        IntegrityBackend,
        lambda inner: VersionedBackend(inner, _CAPACITY // 2),
        lambda inner: IntegrityBackend(VersionedBackend(inner, _CAPACITY // 2)),
    ],
    ids=["plain", "checked", "versions", "checked versions"],
)
@pytest.mark.parametrize("numel", [5 * ALIGNMENT, 40 * ALIGNMENT + 5])
def test_a_request_that_is_over_looks_at_no_memory(wrapped: Callable[[IOBackend], IOBackend], numel: int) -> None:
    """Else whether anybody looks at a buffer after a wait would be a matter of time."""
    keeping = _Keeping()
    with Swapper(wrapped(keeping), SwapperConfig(request_bytes=16 * ALIGNMENT)) as swapper:
        extent = swapper.allocate(numel, "x")
        array = AlignedRegion(numel).array()
        memory, view = torch.from_numpy(array), weakref.ref(array)
        del array
        swapper.write(extent, memory).wait()
        swapper.read(extent, memory).wait()
        del memory
        assert view() is None and keeping.kept


def test_num_bytes_takes_the_front_of_the_buffer(swapper: Swapper) -> None:
    extent = swapper.allocate(100, "x")
    swapper.write(extent, np.arange(50, dtype=np.uint8), num_bytes=10).wait()
    memory = np.full(50, 99, dtype=np.uint8)
    swapper.read(extent, memory, num_bytes=10).wait()
    assert memory[:10].tolist() == list(range(10))
    assert (memory[10:] == 99).all()


def test_aligned_requests_do_not_pass_through_other_memory(tmp_path: Path) -> None:
    with Swapper.open([tmp_path], _CAPACITY) as swapper:
        if not swapper.statistics().is_direct:
            pytest.skip(f"no O_DIRECT in {tmp_path}")
        array = AlignedRegion(1 << 20).array()
        extent = swapper.allocate(array.size, "aligned")
        swapper.write(extent, array).wait()
        swapper.read(extent, array).wait()
        assert swapper.statistics().num_bounced == 0
        swapper.read(extent, array[1:100], offset=1).wait()
        assert swapper.statistics().num_bounced == 1


def test_extents_are_rounded_up_and_can_be_used_whole(swapper: Swapper) -> None:
    extent = swapper.allocate(10, "small")
    assert (extent.num_bytes, extent.requested_bytes, extent.name) == (ALIGNMENT, 10, "small")
    swapper.write(extent, np.ones(ALIGNMENT, dtype=np.uint8)).wait()
    assert "small" in repr(extent)
    empty = swapper.allocate(0, "empty")
    swapper.write(empty, torch.zeros(0)).wait()
    swapper.read(empty, torch.zeros(0)).wait()
    swapper.free(empty)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, ALIGNMENT + 1), (ALIGNMENT, 1), (-1, 1), (ALIGNMENT - 1, 2)])
def test_outside_of_the_extent(swapper: Swapper, offset: int, num_bytes: int) -> None:
    extent = swapper.allocate(ALIGNMENT, "x")
    with pytest.raises(ArgumentError, match=f"'x' has 4096 bytes: {num_bytes} bytes at offset {offset}"):
        swapper.write(extent, np.zeros(num_bytes, dtype=np.uint8), offset=offset)

    for num_bytes in (11, -1):
        with pytest.raises(ArgumentError, match=f"10 bytes, fewer than num_bytes={num_bytes}"):
            swapper.write(extent, np.zeros(10, dtype=np.uint8), num_bytes=num_bytes)


def test_extents_of_another_swapper_are_refused(swapper: Swapper) -> None:
    with Swapper.in_memory(ALIGNMENT) as other:
        extent = other.allocate(1, "foreign")
        for use in (lambda: swapper.write(extent, bytearray(1)), lambda: swapper.free(extent)):
            with pytest.raises(ExtentError, match="'foreign' belongs to another swapper"):
                use()


def test_callbacks(swapper: Swapper, caplog: pytest.LogCaptureFixture) -> None:
    extent = swapper.allocate(1 << 20, "x")
    called: list[Handle] = []
    is_called = threading.Event()

    def callback(handle: Handle) -> None:
        called.append(handle)
        if len(called) == 3:
            is_called.set()
        raise ValueError("callbacks may be wrong")

    handle = swapper.write(extent, np.zeros(1 << 20, dtype=np.uint8))
    handle.add_done_callback(callback)
    handle.add_done_callback(callback)
    handle.wait()
    handle.add_done_callback(callback)
    assert is_called.wait(60)
    assert called == [handle] * 3
    assert "a callback of a finished read or write raised" in caplog.text
    swapper.write(extent, np.zeros(1, dtype=np.uint8)).wait()


def test_statistics_count_what_users_asked_for(swapper: Swapper) -> None:
    extent = swapper.allocate(40 * ALIGNMENT, "x")
    before = swapper.statistics()
    swapper.write(extent, np.zeros(40 * ALIGNMENT, dtype=np.uint8)).wait()
    swapper.read(extent, np.zeros(1000, dtype=np.uint8), offset=5).wait()
    swapper.flush()
    delta = swapper.statistics() - before
    assert (delta.write_bytes, delta.read_bytes) == (40 * ALIGNMENT, 1000)
    assert delta.num_writes in (1, 3) and delta.num_reads == 1, "worker threads take long transfers as one"
    assert (delta.num_retries, delta.num_errors, delta.inflight, delta.queued) == (0, 0, 0, 0)
    assert delta.write_busy_seconds > 0 and delta.read_busy_seconds > 0
    assert delta.capacity_bytes == _CAPACITY and delta.free_bytes == _CAPACITY - 40 * ALIGNMENT


def test_after_close(swapper: Swapper) -> None:
    extent = swapper.allocate(ALIGNMENT, "x")
    handle = swapper.write(extent, bytearray(ALIGNMENT))
    handle.wait()
    swapper.close()
    swapper.close()
    assert swapper.is_closed and handle.done()
    for use in (
        lambda: swapper.read(extent, bytearray(1)),
        lambda: swapper.write(extent, bytearray(1)),
        lambda: swapper.allocate(1, "y"),
        lambda: swapper.free(extent),
        swapper.flush,
        swapper.raise_pending,
    ):
        with pytest.raises(SwapperClosedError, match="has been closed"):
            use()


def test_close_drops_what_waits_and_finishes_what_runs(swapper: Swapper) -> None:
    extent = swapper.allocate(_CAPACITY, "x")
    handles = [swapper.write(extent, np.zeros(_CAPACITY, dtype=np.uint8)) for _ in range(4)]
    swapper.close()
    assert all(handle.done() for handle in handles)
    for handle in handles:
        try:
            handle.wait()
        except SwapperClosedError as error:
            assert "has been closed" in str(error)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda swapper, extent: swapper.write(extent, bytearray(8), offset=-1), "offset"),
        (lambda swapper, extent: swapper.write(extent, bytearray(8), offset=True), "offset"),
        (lambda swapper, extent: swapper.write(extent, bytearray(8), offset="0"), "offset"),
        (lambda swapper, extent: swapper.write(extent, bytearray(8), num_bytes=1.0), "num_bytes"),
        (lambda swapper, extent: swapper.read(None, bytearray(1)), "an extent is needed"),
        (lambda swapper, extent: swapper.free("x"), "an extent is needed"),
        (lambda swapper, extent: swapper.allocate(-1, "y"), "cannot have -1 bytes"),
        (lambda swapper, extent: swapper.allocate(4096.0, "y"), "num_bytes must be an int"),
        (lambda swapper, extent: swapper.close(float("nan")), "timeout_seconds must be a number of seconds"),
        (lambda swapper, extent: Swapper.in_memory(1e6), r"must be an int, got .*int\(\)"),
        (lambda swapper, extent: SwapperConfig(request_bytes=2**20 / 2), r"must be an int, got .*int\(\)"),
        (lambda swapper, extent: SwapperConfig(deadline_seconds="1"), "deadline_seconds must be a number of seconds"),
        (lambda swapper, extent: StagingPool(4096.0, 1), r"must be an int, got .*int\(\)"),
    ],
)
def test_arguments_of_other_kinds_are_refused(call: Callable[..., Any], words: str) -> None:
    with Swapper.in_memory(1 << 20) as swapper, pytest.raises(ArgumentError, match=words):
        call(swapper, swapper.allocate(8192, "x"))


def test_bytes_that_nobody_wrote_are_not_read(swapper: Swapper) -> None:
    extent = swapper.allocate(1000, "x")
    memory = np.zeros(1000, dtype=np.uint8)
    with pytest.raises(ExtentError, match="'x' was never written at bytes 0 to 1000"):
        swapper.read(extent, memory)
    swapper.write(extent, memory[:400])
    swapper.write(extent, memory[:400], offset=500)
    with pytest.raises(ExtentError, match="at bytes 400 to 500"):
        swapper.read(extent, memory[:900])
    swapper.read(extent, memory[:400]).wait()
    swapper.read(extent, memory[:400], offset=500).wait()
