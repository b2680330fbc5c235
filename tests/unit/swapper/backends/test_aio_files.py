"""The portable backend: threads and files end with it, however it ends, and a hung drive keeps nobody."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swapper import ALIGNMENT, SwapperConfig
from swapper.backend import Direction, IORequest
from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.volume_backend import VolumeBackend
from swapper.measure.choice import open_backend
from swapper.volumes.volume import Volume
from tests.conformance.suite import aligned_bytes, random_bytes, start
from tests.waiting import wait_until

_READ, _WRITE = Direction.READ, Direction.WRITE


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "aiofiles" in thread.name]


class _Gate:
    """Holds up transfers of one direction, or of one file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[IORequest], bool]) -> None:
        self.is_open = threading.Event()
        self.num_held = 0
        real = VolumeBackend.transfer

        def call(backend: VolumeBackend, request: IORequest, *rest: Any) -> None:
            if holds(request):
                self.num_held += 1
                self.is_open.wait(60)
            real(backend, request, *rest)

        monkeypatch.setattr(VolumeBackend, "transfer", call)


def test_a_completion_that_raises_is_logged_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def complain(request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        raise ValueError("not today")

    backend = AiofilesBackend(Volume([tmp_path], 4 * ALIGNMENT), 1)
    memory = aligned_bytes(ALIGNMENT)
    backend.submit(IORequest(_WRITE, 0, memory.data, memory.__array_interface__["data"][0], complain))
    start(backend, _WRITE, ALIGNMENT, memory).require_whole(ALIGNMENT)
    assert backend.close(5.0)
    assert "not today" in caplog.text


def test_a_transfer_that_raises_is_completed_with_an_error_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VolumeBackend.transfer

    def call(backend: VolumeBackend, request: IORequest, *rest: Any) -> None:
        if request.direction is _READ:
            raise ValueError("not today")
        real(backend, request, *rest)

    monkeypatch.setattr(VolumeBackend, "transfer", call)
    backend = AiofilesBackend(Volume([tmp_path], 4 * ALIGNMENT), 1)
    failed = start(backend, _READ, 0, aligned_bytes(ALIGNMENT))
    failed.wait()
    assert failed.transferred_bytes == 0 and "ValueError: not today" in str(failed.error)
    start(backend, _WRITE, 0, aligned_bytes(ALIGNMENT)).require_whole(ALIGNMENT)
    assert backend.close(5.0)


def test_slow_writes_do_not_hold_up_reads_nor_one_file_another(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(paths[:2], 8 * ALIGNMENT, stripe_bytes=ALIGNMENT)
    gate = _Gate(
        monkeypatch, lambda request: request.direction is _WRITE and volume.file_ranges(request.offset, 1)[0][0] == 0
    )
    backend = AiofilesBackend(volume, 1)
    columns = [volume.file_ranges(index * ALIGNMENT, 1)[0][0] for index in range(8)]
    held = [start(backend, _WRITE, columns.index(0) * ALIGNMENT, random_bytes(ALIGNMENT, index)) for index in range(3)]
    start(backend, _READ, columns.index(0) * ALIGNMENT, aligned_bytes(ALIGNMENT)).require_whole(ALIGNMENT)
    start(backend, _WRITE, columns.index(1) * ALIGNMENT, aligned_bytes(ALIGNMENT)).require_whole(ALIGNMENT)
    wait_until(lambda: gate.num_held == 1)
    assert not any(completion.num_calls for completion in held)
    gate.is_open.set()
    for completion in held:
        completion.require_whole(ALIGNMENT)
    assert backend.close(5.0)


# ------------------------------------------------------------------------------------------------------- its end


def test_close_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _Gate(monkeypatch, lambda request: request.direction is _WRITE)
    volume = Volume([tmp_path], 4 * ALIGNMENT)
    backend = AiofilesBackend(volume, 1)
    completion = start(backend, _WRITE, 0, aligned_bytes(ALIGNMENT))
    wait_until(lambda: gate.num_held == 1)
    assert not backend.close(0.05)
    assert "a transfer hangs" in caplog.text and volume.files[0].fd >= 0
    gate.is_open.set()
    completion.require_whole(ALIGNMENT)
    wait_until(lambda: _own_threads() == [])
    assert backend.close(5.0) and volume.files[0].fd == -1


def test_one_that_nobody_closes_ends_with_its_last_reference(tmp_path: Path) -> None:
    backend = AiofilesBackend(Volume([tmp_path], 4 * ALIGNMENT), 2)
    file = weakref.ref(backend.volume.files[0])
    start(backend, _WRITE, 0, aligned_bytes(ALIGNMENT)).require_whole(ALIGNMENT)
    del backend
    gc.collect()
    wait_until(lambda: _own_threads() == [])
    gc.collect()
    assert file() is None


# ----------------------------------------------------------------------------------------------- when it is chosen


def _opened(volume: Volume, **settings: object) -> str:
    backend = open_backend(volume, SwapperConfig(**settings))  # type: ignore[arg-type]
    try:
        return type(backend).__name__
    finally:
        backend.close(5.0)


def test_a_network_file_system_gets_it_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swapper.volumes.file_system._mount_of", lambda path: ("nfs4", "server:/export"))
    with caplog.at_level(logging.INFO, "swapper"):
        assert _opened(Volume([tmp_path], ALIGNMENT)) == "AiofilesBackend"
    (line,) = [record.message for record in caplog.records if record.name == "swapper.measure.choice"]
    assert line == f"aiofiles is used: {str(tmp_path)!r} is on a network file system (nfs4)"
    assert _opened(Volume([tmp_path], ALIGNMENT), backend="threads") == "ThreadsBackend"


def test_a_file_system_without_direct_transfers_gets_it_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refusing(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    with caplog.at_level(logging.INFO, "swapper"):
        assert _opened(Volume([tmp_path], ALIGNMENT)) == "AiofilesBackend"
    (line,) = [record.message for record in caplog.records if record.name == "swapper.measure.choice"]
    assert line.startswith("aiofiles is used: ") and "the file system refuses O_DIRECT: Invalid argument" in line
