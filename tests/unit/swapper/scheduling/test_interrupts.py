"""A signal at the worst moment: between taking a request and starting it. Each moment is provoked, not hoped for."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import replace
from pathlib import Path
from types import CodeType

import numpy as np
import pytest

import swapper as swapper_package
from swapper import (
    ALIGNMENT,
    BrokenExtentError,
    ExtentError,
    Priority,
    StallError,
    Swapper,
    SwapperConfig,
)
from swapper.backend import IORequest
from swapper.backends.memory import MemoryBackend
from swapper.scheduling.transfer_queue import TransferQueue
from swapper.scheduling.waiting import WaitingRoom
from tests.interrupts import Interrupt, is_cut_off
from tests.manual_backend import ManualBackend
from tests.unit.late_backend import stall

_BLOCK = ALIGNMENT
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=20.0)


def _bytes(num_blocks: int, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


class _Threads(MemoryBackend):
    """Knows on which threads it was given requests, and completes them there."""

    def __init__(self) -> None:
        super().__init__(64 * _BLOCK)
        self.concurrency = 2
        self.threads: set[threading.Thread] = set()

    def submit(self, request: IORequest) -> None:
        self.threads.add(threading.current_thread())
        super().submit(request)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(Path(swapper_package.__file__).parent))


def test_no_interrupt_can_lose_a_transfer() -> None:
    """Wherever it comes: what was asked for is done or refused, and all that follows goes on at once."""
    data, more = _bytes(8, 3), _bytes(8, 4)

    def work(interrupt: Interrupt) -> None:
        with interrupt:
            handles = [swapper.write(extent, data), swapper.write(extent, more, offset=8 * _BLOCK)]
            handles.append(swapper.read(extent, _bytes(2), offset=8 * _BLOCK))
            for handle in handles:
                handle.promote(Priority.DEMAND)
            handles[-1].wait()
            swapper.flush()
            swapper.free(swapper.allocate(_BLOCK, "short"))

    backend = _Threads()
    with Swapper(backend, replace(_CONFIG, deadline_seconds=1000.0)) as swapper:  # no watchdog comes to help
        extent = swapper.allocate(16 * _BLOCK, "x")
        counted = Interrupt(_is_ours)
        work(counted)
        num_interrupts = 0
        for point in counted.points:
            interrupt = Interrupt(_is_ours, point)
            num_interrupts += is_cut_off(functools.partial(work, interrupt), interrupt)
            swapper.write(extent, _bytes(16, 5)).wait(60)
            swapper.read(extent, copy := _bytes(16, 0)).wait(60)
            swapper.flush()
            assert (copy == 5).all(), interrupt.where
            assert not swapper._scheduler._active, interrupt.where
        assert num_interrupts > 50
    assert threading.main_thread() not in backend.threads and backend.threads


@pytest.mark.off_main_thread
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


@pytest.mark.off_main_thread
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
        with pytest.raises(ExtentError, match="'x' has been freed"):
            swapper.read(extents[0], _bytes(1))
        assert swapper.free_bytes == 48 * _BLOCK, "the drive may still write there"
        backend.complete_all()
        assert swapper.free_bytes == 64 * _BLOCK
        with pytest.raises(ExtentError, match="'x' was freed twice"):
            swapper.free(extents[0])


@pytest.mark.off_main_thread
def test_a_free_that_was_interrupted_anywhere_loses_no_space() -> None:
    def free(interrupt: Interrupt) -> None:
        with interrupt:
            swapper.free(extent)

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        counted = Interrupt(_is_ours)
        free(counted)
        for point in counted.points:
            extent = swapper.allocate(8 * _BLOCK, "x")
            interrupt = Interrupt(_is_ours, point)
            if is_cut_off(functools.partial(free, interrupt), interrupt):
                with contextlib.suppress(ExtentError):
                    swapper.free(extent)  # it may be repeated, if it has not come to its end
            assert swapper.free_bytes == 64 * _BLOCK, interrupt.where
    assert len(counted.points) > 10


@pytest.mark.off_main_thread
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
