"""A signal at the worst moment: between taking a request and starting it. Each moment is provoked, not hoped for."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import CodeType

import numpy as np
import pytest

import swapper as swapper_package
from swapper import (
    ALIGNMENT,
    BrokenExtentError,
    FreedExtentError,
    StallError,
    Swapper,
    SwapperClosedError,
    SwapperConfig,
)
from swapper.backend import IORequest
from swapper.scheduling.transfer_queue import TransferQueue
from swapper.scheduling.waiting import WaitingRoom
from tests.interrupts import Interrupt, is_cut_off
from tests.late_backend import stall
from tests.manual_backend import ManualBackend

_BLOCK = ALIGNMENT
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=20.0)


class _Interrupted(ManualBackend):
    """Raises KeyboardInterrupt at the chosen submissions, counted from 1."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(64 * _BLOCK, concurrency=4)
        self._numbers = numbers
        self._num_calls = 0

    def submit(self, request: IORequest) -> None:
        self._num_calls += 1
        if self._num_calls in self._numbers:
            raise KeyboardInterrupt
        super().submit(request)


def _bytes(num_blocks: int, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


def test_transfers_that_were_not_handed_over_go_back_to_the_queue() -> None:
    backend = _Interrupted(2)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        with pytest.raises(KeyboardInterrupt):
            swapper.write(extent, _bytes(4))
        assert [offset // _BLOCK for _, offset, _ in backend.log] == [0]
        other = swapper.write(extent, _bytes(1), offset=7 * _BLOCK)
        assert sorted(offset // _BLOCK for _, offset, _ in backend.log[1:]) == [2, 3]
        backend.complete_all()
        other.wait()
        assert sorted(offset // _BLOCK for _, offset, _ in backend.log) == [0, 2, 3, 7]


def test_a_wait_starts_what_an_interrupt_left_in_the_queue() -> None:
    backend = _Interrupted(1)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        operations = swapper._scheduler._active
        with pytest.raises(KeyboardInterrupt):
            swapper.write(extent, _bytes(3))
        (operation,) = operations
        with pytest.raises(TimeoutError):
            swapper._scheduler.wait(operation, 0.01)
        assert len(backend.submitted) == 2


def test_close_ends_a_request_whose_transfer_was_lost() -> None:
    backend = _Interrupted(2)
    swapper = Swapper(backend, _CONFIG)
    extent = swapper.allocate(8 * _BLOCK, "x")
    waiting = []
    with pytest.raises(KeyboardInterrupt):
        waiting.append(swapper.write(extent, _bytes(2)))
    behind = swapper.read(extent, _bytes(2))
    assert not behind.done()
    swapper.close()
    with pytest.raises(SwapperClosedError):
        behind.wait()
    assert not swapper._scheduler._active


def test_a_write_that_was_never_queued_leaves_its_bytes_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(2 * _BLOCK, "x")
        swapper.write(extent, _bytes(2, 1))
        backend.complete_all()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(TransferQueue, "enqueue", interrupted)
            swapper.write(extent, _bytes(1, 2))
        with pytest.raises(BrokenExtentError, match="at bytes 0 to 4096"):
            swapper.read(extent, _bytes(2))
        swapper.read(extent, _bytes(1), offset=_BLOCK)
        swapper.write(extent, _bytes(1, 3))
        copy = _bytes(2, 0)
        swapper.read(extent, copy)
        backend.complete_all()
        swapper.flush()
        assert copy.reshape(2, _BLOCK)[:, 0].tolist() == [3, 1]
        swapper.free(extent)


def test_an_interrupted_free_gives_the_space_back_when_the_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extents = [swapper.allocate(8 * _BLOCK, name) for name in "xy"]
        for extent in extents:
            swapper.write(extent, _bytes(8))
        with monkeypatch.context() as patched:
            patched.setattr(WaitingRoom, "wait", interrupted)
            for extent in extents:
                with pytest.raises(KeyboardInterrupt):
                    swapper.free(extent)
        with pytest.raises(FreedExtentError, match="'x' has been freed"):
            swapper.read(extents[0], _bytes(1))
        assert swapper.free_bytes == 48 * _BLOCK, "the drive may still write there"
        backend.complete_all()
        assert swapper.free_bytes == 64 * _BLOCK
        with pytest.raises(FreedExtentError, match="'x' was freed twice"):
            swapper.free(extents[0])


def test_a_free_that_was_interrupted_anywhere_loses_no_space() -> None:
    def is_ours(code: CodeType) -> bool:
        return code.co_filename.startswith(str(Path(swapper_package.__file__).parent))

    def free(interrupt: Interrupt) -> None:
        with interrupt:
            swapper.free(extent)

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        counted = Interrupt(is_ours)
        free(counted)
        for point in counted.points:
            extent = swapper.allocate(8 * _BLOCK, "x")
            interrupt = Interrupt(is_ours, point)
            if is_cut_off(functools.partial(free, interrupt), interrupt):
                with contextlib.suppress(FreedExtentError):
                    swapper.free(extent)  # it may be repeated, if it has not come to its end
            assert swapper.free_bytes == 64 * _BLOCK, interrupt.where
    assert len(counted.points) > 10


def test_the_space_of_a_hung_write_comes_back_when_it_has_ended() -> None:
    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        handle = swapper.write(extent, _bytes(8))
        stall(swapper._scheduler)
        assert isinstance(handle.error, StallError)
        swapper.free(extent)
        assert swapper.free_bytes == 56 * _BLOCK
        backend.complete_all()
        assert swapper.free_bytes == 64 * _BLOCK
