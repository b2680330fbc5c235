"""A signal at the worst moment: while a request is being started. Each moment is provoked, not hoped for."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from dis import opname
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swapper import ALIGNMENT, AlignedRegion, ExtentError, StallError, Swapper, SwapperConfig
from swapper.backend import IORequest
from swapper.backends.memory import MemoryBackend
from swapper.scheduling import waiting
from swapper.scheduling.scheduler import IOScheduler
from swapper.scheduling.transfer_queue import TransferQueue
from tests.manual_backend import ManualBackend
from tests.unit.late_backend import stall
from tests.waiting import wait_until

_BLOCK = ALIGNMENT
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=20.0)


def _bytes(num_blocks: int, value: int = 1) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


class _Interrupted(MemoryBackend):
    """Somebody presses Ctrl-C in the midst of each submission of the main thread."""

    def submit(self, request: IORequest) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        super().submit(request)


def test_an_interrupt_loses_no_transfer() -> None:
    """It comes when what was asked for is with the backend, and all that follows goes on at once."""
    with Swapper(_Interrupted(64 * _BLOCK, 2), replace(_CONFIG, deadline_seconds=1000.0)) as swapper:
        extent = swapper.allocate(16 * _BLOCK, "x")
        data, copy = _bytes(16, 5), _bytes(16, 0)
        with pytest.raises(KeyboardInterrupt):
            swapper.write(extent, data)
        swapper.flush()
        with pytest.raises(KeyboardInterrupt):
            swapper.read(extent, copy)
        swapper.free(extent)
        assert (copy == 5).all() and not swapper._scheduler._active


def _interrupt(moments: int) -> Callable[[FrameType, str, object], Any]:
    """For `sys.settrace`: Ctrl-C at the last of so many moments at which CPython handles signals in code of the swapper."""
    left, before = [moments], dict[FrameType, str]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = any(part in frame.f_code.co_filename for part in ("swapper/s", "swapper/backends"))
        if event == "call":
            before[frame] = "RESUME"
        if event != "opcode":
            return trace
        name, before[frame] = before[frame], opname[frame.f_code.co_code[frame.f_lasti]]
        if name.startswith("CALL") or name in {"RESUME", "JUMP_BACKWARD"}:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return trace

    return trace


# With io_uring, several requests go the general way, which defers signals. Those that a trace makes come there all the same.
@pytest.mark.parametrize(("num_blocks", "backend"), [(1, "threads"), (16, "threads"), (1, "uring")])
def test_an_interrupt_at_any_moment_of_a_start_leaves_it_undone_or_done(
    num_blocks: int, backend: Any, tmp_path: Path
) -> None:
    if backend == "uring":
        pytest.importorskip("liburing", reason="the extra uring is not installed")
    config = replace(_CONFIG, backend=backend, deadline_seconds=1000.0)
    with Swapper.open(tmp_path, 16 * _BLOCK, config) as swapper:
        extent = swapper.allocate(16 * _BLOCK, "x")
        swapper.write(extent, _bytes(16, 5)).wait()
        scheduler, copy, num_interrupts = swapper._scheduler, AlignedRegion(num_blocks * _BLOCK).array(), 0
        while num_interrupts < 1000:
            sys.settrace(_interrupt(num_interrupts + 1))
            try:
                swapper.read(extent, copy)
                break
            except KeyboardInterrupt:
                num_interrupts += 1
            finally:
                sys.settrace(None)
            wait_until(lambda: not scheduler._active and not any(each.rows for each in scheduler._ledgers.values()))
            assert not scheduler.lock._is_owned() and not swapper.statistics().inflight
        assert 15 < num_interrupts < 1000
        swapper.flush()
        swapper.free(extent)
    assert (copy == 5).all()


def test_an_interrupt_cuts_off_a_wait() -> None:
    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, replace(_CONFIG, deadline_seconds=1000.0)) as swapper:
        handle = swapper.write(swapper.allocate(_BLOCK, "x"), _bytes(1))
        main = threading.get_ident()
        timer = threading.Timer(
            0.05, lambda: signal.pthread_kill(main, signal.SIGINT)
        )  # a true one, which ends a sleep
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        timer.join()
        backend.complete_all()
        handle.wait()


def test_a_wait_within_a_wait_and_one_after_a_late_end_sleep_on_their_own() -> None:
    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, replace(_CONFIG, deadline_seconds=1000.0)) as swapper:
        extent = swapper.allocate(4 * _BLOCK, "x")
        outer, inner, last = (swapper.write(extent, _bytes(1), offset=index * _BLOCK) for index in range(3))
        ended: list[str] = []

        def on_signal(*_: object) -> None:
            threading.Timer(0.05, backend.complete, (1,)).start()
            inner.wait()
            ended.append("inner")
            threading.Timer(0.05, backend.complete).start()

        before = signal.signal(signal.SIGALRM, on_signal)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            outer.wait()
            ended.append("outer")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert ended == ["inner", "outer"]
        for _ in range(2):
            with pytest.raises(StallError):
                last.wait(0.001)
        backend.complete_all()
        late = swapper.write(extent, _bytes(1))
        with pytest.raises(StallError):
            late.wait(0.001)
        backend.complete_all()
        late.wait()


def test_waits_take_one_lock_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_acquired = [0]

    class Counting:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def acquire(self, *arguments: object, **options: object) -> bool:
            num_acquired[0] += 1
            return self._lock.acquire(*arguments, **options)  # type: ignore[arg-type]

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(8 * _BLOCK, "x")
        handles = [swapper.write(extent, _bytes(1), offset=index * _BLOCK) for index in range(8)]
        monkeypatch.setattr(waiting, "threading", SimpleNamespace(Lock=Counting))
        found: list[int] = []

        def wait_for_all() -> None:
            for handle in handles:
                handle.wait()
            found.append(num_acquired[0])

        thread = threading.Thread(target=wait_for_all)
        thread.start()
        for handle in handles:
            wait_until(lambda: bool(handle.callbacks))  # noqa: B023 (called at once)
            backend.complete()
        thread.join(60)
        assert found == [1 + len(handles)], "one more for the first, which takes the thread's lock"


@pytest.mark.off_main_thread
def test_a_write_that_was_never_queued_leaves_its_bytes_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    backend = ManualBackend(64 * _BLOCK)
    with Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(3 * _BLOCK, "x")  # the last one is never written: so the write is queued
        swapper.write(extent, _bytes(2, 1))
        backend.complete_all()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(TransferQueue, "enqueue", interrupted)
            swapper.write(extent, _bytes(1, 2))
        with pytest.raises(ExtentError, match="at bytes 0 to 4096"):
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
            patched.setattr(IOScheduler, "sleep", interrupted)
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
