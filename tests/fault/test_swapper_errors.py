"""What a user sees when a transfer fails: everything by name, once, and never stale bytes."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swapper import (
    ALIGNMENT,
    Extent,
    ExtentError,
    Handle,
    StallError,
    Swapper,
    SwapperConfig,
    SwapperError,
    TransferError,
    Volume,
)
from swapper.backend import Direction
from swapper.backends import MemoryBackend, ThreadsBackend
from tests.faults import FaultInjectingBackend, FaultRule
from tests.manual_backend import ManualBackend

pytestmark = pytest.mark.off_main_thread

_BLOCK = ALIGNMENT
_CAPACITY = 64 * _BLOCK
_CONFIG = SwapperConfig(request_bytes=4 * _BLOCK, deadline_seconds=20.0, max_retries=3)


@pytest.fixture
def backend(tmp_path: Path) -> FaultInjectingBackend:
    return FaultInjectingBackend(ThreadsBackend(Volume([tmp_path], _CAPACITY), num_threads=2))


@pytest.fixture
def swapper(backend: FaultInjectingBackend) -> Iterator[Swapper]:
    with Swapper(backend, _CONFIG) as made:
        yield made


def _bytes(num_blocks: int, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


def _written(swapper: Swapper, num_blocks: int, name: str = "layer 3") -> Extent:
    extent = swapper.allocate(num_blocks * _BLOCK, name)
    swapper.write(extent, _bytes(num_blocks)).wait()
    return extent


# ---------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("direction", Direction)
def test_an_io_error_names_everything(
    swapper: Swapper, backend: FaultInjectingBackend, tmp_path: Path, direction: Direction
) -> None:
    _written(swapper, 3, "first")
    extent = _written(swapper, 9)
    backend.add(FaultRule(direction=direction, nth=2, errno=errno.EIO))
    name = direction.name.lower()
    with pytest.raises(TransferError) as caught:
        getattr(swapper, name)(extent, _bytes(9)).wait()
    error = caught.value
    assert (error.operation, error.extent_name, error.errno) == (name, "layer 3", errno.EIO)
    assert (error.offset, error.num_bytes) == ((3 + 4) * _BLOCK, 4 * _BLOCK)
    assert str(tmp_path) in error.file
    for part in (name, "16384 bytes", "offset 28672", str(tmp_path), "'layer 3'", "errno 5, EIO", "kernel log"):
        assert part in str(error)
    assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


def test_a_file_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    with Swapper.open([tmp_path], _CAPACITY, _CONFIG) as swapper:
        extent = _written(swapper, 8)
        os.ftruncate(swapper.backend.volume.files[0].fd, 5 * _BLOCK)  # type: ignore[attr-defined]
        with pytest.raises(TransferError, match="stopped after 0 bytes at the last of 4 attempts") as caught:
            swapper.read(extent, _bytes(8)).wait()
        assert caught.value.offset == 5 * _BLOCK


# ------------------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(errno=errno.EINTR, times=3),
        FaultRule(errno=errno.EAGAIN, times=3),
        FaultRule(short_bytes=0, times=3),
        FaultRule(short_bytes=_BLOCK, times=3),
        FaultRule(short_bytes=_BLOCK + 7, times=3),
    ],
    ids=str,
)
def test_transient_errors_and_short_transfers_are_retried(
    swapper: Swapper, backend: FaultInjectingBackend, direction: Direction, rule: FaultRule
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * _BLOCK, dtype=np.uint8)
    copy = np.zeros_like(data)
    extent = swapper.allocate(data.size, "x")
    if direction is Direction.WRITE:
        backend.add(rule)
    swapper.write(extent, data).wait()
    backend.add(rule)
    before = swapper.statistics()
    swapper.read(extent, copy).wait()
    assert np.array_equal(copy, data)
    delta = swapper.statistics() - before
    assert (delta.num_retries, delta.num_reads, delta.read_bytes) == (3, 1, data.size)
    assert swapper.statistics().num_errors == 0


def test_retries_are_bounded(swapper: Swapper, backend: FaultInjectingBackend) -> None:
    extent = _written(swapper, 1)
    backend.add(FaultRule(errno=errno.EAGAIN, times=4))
    with pytest.raises(TransferError, match="EAGAIN"):
        swapper.read(extent, _bytes(1)).wait()
    assert swapper.statistics().num_retries == 3
    backend.add(FaultRule(short_bytes=100, times=4))
    with pytest.raises(TransferError, match="stopped after 100 bytes at the last of 4 attempts"):
        swapper.read(extent, _bytes(1)).wait()
    swapper.read(extent, _bytes(1)).wait()
    backend.add(FaultRule(errno=errno.EIO, times=1))
    with pytest.raises(TransferError, match="EIO"):
        swapper.read(extent, _bytes(1)).wait()
    assert swapper.statistics().num_retries == 6, "EIO must not be tried again"


# ---------------------------------------------------------------------------------------------------- broken bytes


def test_a_failed_write_breaks_its_bytes_until_they_are_rewritten(
    swapper: Swapper, backend: FaultInjectingBackend
) -> None:
    extent = _written(swapper, 6)
    backend.add(FaultRule(direction=Direction.WRITE, errno=errno.EIO, times=1))
    with pytest.raises(TransferError):
        swapper.write(extent, _bytes(3, 2), offset=_BLOCK).wait()
    swapper.read(extent, _bytes(1)).wait()
    swapper.read(extent, _bytes(2), offset=4 * _BLOCK).wait()
    with pytest.raises(ExtentError, match=r"'layer 3' cannot be read at bytes 4096 to 16384: .*write that range again"):
        swapper.read(extent, _bytes(6))
    swapper.write(extent, _bytes(1, 3), offset=2 * _BLOCK).wait()
    swapper.read(extent, _bytes(1), offset=2 * _BLOCK).wait()
    for block in (1, 3):
        with pytest.raises(ExtentError, match=f"at bytes {block * _BLOCK} to {(block + 1) * _BLOCK}"):
            swapper.read(extent, _bytes(1), offset=block * _BLOCK)
    swapper.write(extent, _bytes(3, 4), offset=_BLOCK)
    copy = _bytes(6, 0)
    swapper.read(extent, copy).wait()
    assert copy.reshape(6, _BLOCK)[:, 7].tolist() == [1, 4, 4, 4, 1, 1]


def test_a_failed_write_may_have_torn_its_neighbours_in_the_block() -> None:
    backend = ManualBackend(_CAPACITY, block_bytes=_BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(_BLOCK, "x")
        swapper.write(extent, np.ones(200, dtype=np.uint8))
        backend.complete()
        handle = swapper.write(extent, np.ones(100, dtype=np.uint8))
        backend.fail(errno.EIO)
        assert isinstance(handle.error, TransferError)
        swapper.write(extent, np.ones(100, dtype=np.uint8))
        backend.complete()
        with pytest.raises(ExtentError, match="at bytes 100 to 200"):
            swapper.read(extent, np.empty(200, dtype=np.uint8))


def test_requests_behind_a_failing_write() -> None:
    backend = ManualBackend(_CAPACITY)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(2 * _BLOCK, "x")
        swapper.write(extent, _bytes(2, 1))
        backend.complete()
        failing = swapper.write(extent, _bytes(1, 2))
        stale = swapper.read(extent, _bytes(1, 9))
        healing = swapper.write(extent, _bytes(1, 3))
        copy = _bytes(1, 9)
        healed = swapper.read(extent, copy)
        backend.fail(errno.ENOSPC)
        assert failing.done() and stale.done() and not healing.done()
        with pytest.raises(TransferError, match="ENOSPC"):
            failing.wait()
        with pytest.raises(ExtentError):
            stale.wait()
        backend.complete_all()
        healing.wait()
        healed.wait()
        assert (copy == 3).all()


def test_one_failing_piece_fails_the_request_when_all_pieces_are_back() -> None:
    backend = ManualBackend(_CAPACITY, concurrency=3)
    with Swapper(backend, SwapperConfig(request_bytes=_BLOCK)) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        memory = _bytes(8)
        handle = swapper.write(extent, memory)
        backend.fail(errno.EIO, 1)
        assert not handle.done(), "the backend still has the buffer"
        assert len(backend.submitted) == 3, "nothing more of a failed request may be started"
        backend.complete()
        backend.fail(errno.ENODEV)
        assert handle.done()
        with pytest.raises(TransferError, match="EIO"):
            handle.wait()
        assert len(backend.submitted) == 3


# --------------------------------------------------------------------------------------- errors are never lost


def _fail_unseen(swapper: Swapper, backend: FaultInjectingBackend, extent: Extent) -> Handle:
    backend.add(FaultRule(errno=errno.EIO, times=1))
    handle = swapper.write(extent, _bytes(1))
    while not handle.done():
        time.sleep(0.001)
    return handle


@pytest.mark.parametrize("call", ["read", "write", "flush", "raise_pending"])
def test_the_next_call_raises_what_nobody_has_seen_once(
    swapper: Swapper, backend: FaultInjectingBackend, call: str
) -> None:
    extent = _written(swapper, 4)
    other = _written(swapper, 1, "other")
    handle = _fail_unseen(swapper, backend, extent)
    arguments = (other, _bytes(1)) if call in ("read", "write") else ()
    with pytest.raises(TransferError, match="'layer 3'"):
        getattr(swapper, call)(*arguments)
    getattr(swapper, call)(*arguments)
    swapper.flush()
    with pytest.raises(TransferError):
        handle.wait()  # who asks for it gets it, however often
    swapper.raise_pending()


def test_an_error_that_was_seen_is_not_raised_again(swapper: Swapper, backend: FaultInjectingBackend) -> None:
    extent = _written(swapper, 4)
    waited = _fail_unseen(swapper, backend, extent)
    with pytest.raises(TransferError):
        waited.wait()
    swapper.raise_pending()
    looked_at = _fail_unseen(swapper, backend, extent)
    assert isinstance(looked_at.error, TransferError) and "failed" in repr(looked_at)
    swapper.raise_pending()


def test_an_error_with_a_waiting_thread_belongs_to_that_thread() -> None:
    backend = ManualBackend(_CAPACITY)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(_BLOCK, "x")
        handle = swapper.write(extent, _bytes(1))
        caught: list[SwapperError] = []

        def wait() -> None:
            try:
                handle.wait()
            except SwapperError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not handle.callbacks:
            time.sleep(0.001)
        backend.fail(errno.EIO)
        thread.join(10)
        assert [type(error) for error in caught] == [TransferError]
        swapper.raise_pending()


def test_a_waiter_that_gave_up_leaves_the_error_to_the_next_call() -> None:
    backend = ManualBackend(_CAPACITY)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(_BLOCK, "x")
        handle = swapper.write(extent, _bytes(1))
        with pytest.raises(StallError, match=r"not over after a wait of 0\.01 seconds \(running\)"):
            handle.wait(0.01)
        assert not handle.done() and handle.error is None
        backend.fail(errno.EIO)
        with pytest.raises(TransferError, match="EIO"):
            swapper.raise_pending()


def test_close_logs_what_nobody_has_seen(caplog: pytest.LogCaptureFixture) -> None:
    swapper = Swapper(FaultInjectingBackend(MemoryBackend(_CAPACITY), [FaultRule(errno=errno.EIO)]))
    extent = swapper.allocate(_BLOCK, "forgotten")
    swapper.write(extent, _bytes(1))
    with caplog.at_level(logging.ERROR):
        swapper.close()
    assert "an error that nobody has seen" in caplog.text and "'forgotten'" in caplog.text


def test_an_unexpected_error_on_a_worker_thread_is_a_failed_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("a bug")

    with Swapper.open([tmp_path], _CAPACITY, _CONFIG) as swapper:
        extent = _written(swapper, 1)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(TransferError, match="RuntimeError: a bug"):
            swapper.read(extent, _bytes(1)).wait()
        monkeypatch.undo()
        swapper.read(extent, _bytes(1)).wait()
