"""The portable backend: threads and files end with it, however it ends, and a hung drive keeps nobody."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swapper import ALIGNMENT, SwapperConfig
from swapper.backend import Direction, IORequest
from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.file_transfer import FileTransfer
from swapper.measure.choice import open_backend
from swapper.testing.conformance import aligned_bytes, random_bytes, start
from swapper.volumes.volume import Volume
from tests.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[4]
_READ, _WRITE = Direction.READ, Direction.WRITE


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "aiofiles" in thread.name]


class _Gate:
    """Holds up transfers of one direction, or of one file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[IORequest], bool]) -> None:
        self.is_open = threading.Event()
        self.num_held = 0
        real = FileTransfer.__call__

        def call(transfer: FileTransfer, request: IORequest, *rest: Any) -> None:
            if holds(request):
                self.num_held += 1
                self.is_open.wait(60)
            real(transfer, request, *rest)

        monkeypatch.setattr(FileTransfer, "__call__", call)


def test_an_error_of_the_system_is_the_requests_error(tmp_path: Path) -> None:
    volume = Volume([tmp_path], 64 * ALIGNMENT)
    backend = AiofilesBackend(volume)
    volume.close()
    completion = start(backend, _READ, 0, aligned_bytes(ALIGNMENT))
    completion.wait()
    assert completion.error is not None and completion.error.errno == errno.EBADF
    assert completion.error.__traceback__ is None
    assert backend.close(5.0)


def test_a_completion_that_raises_is_logged_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def complain(request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        raise ValueError("not today")

    backend = AiofilesBackend(Volume([tmp_path], 4 * ALIGNMENT), 1)
    memory = aligned_bytes(ALIGNMENT)
    backend.submit(IORequest(_WRITE, 0, memory.data, memory.__array_interface__["data"][0], complain))
    start(backend, _WRITE, ALIGNMENT, memory).require_whole(ALIGNMENT)
    assert backend.close(5.0)
    assert "not today" in caplog.text


@pytest.mark.parametrize("direction", Direction)
def test_buffers_are_let_go_of(tmp_path: Path, direction: Direction) -> None:
    backend = AiofilesBackend(Volume([tmp_path], 4 * ALIGNMENT), 1)
    array = np.zeros(ALIGNMENT, dtype=np.uint8)
    reference = weakref.ref(array)
    start(backend, direction, 0, array).require_whole(ALIGNMENT)
    del array
    wait_until(lambda: reference() is None)
    assert backend.close(5.0)


def test_slow_writes_do_not_hold_up_reads_nor_one_file_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    volume = Volume([tmp_path / "a", tmp_path / "b"], 8 * ALIGNMENT, stripe_bytes=ALIGNMENT)
    gate = _Gate(monkeypatch, lambda request: request.direction is _WRITE and volume.column_of(request.offset) == 0)
    backend = AiofilesBackend(volume, 1)
    columns = [volume.column_of(index * ALIGNMENT) for index in range(8)]
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


def test_close_carries_out_what_was_submitted_and_ends_all_threads(tmp_path: Path) -> None:
    volume = Volume([tmp_path], 64 * ALIGNMENT)
    backend = AiofilesBackend(volume, 2)
    assert len(_own_threads()) == 5
    completions = [start(backend, _WRITE, index * ALIGNMENT, aligned_bytes(ALIGNMENT)) for index in range(64)]
    assert backend.close(10.0) and backend.close(10.0)
    for completion in completions:
        completion.require_whole(ALIGNMENT)
    assert _own_threads() == [] and volume.files[0].fd == -1
    late = start(backend, _WRITE, 0, aligned_bytes(ALIGNMENT))
    assert late.error is not None and late.error.errno == errno.ESHUTDOWN


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


def _run(code: str, *arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    result = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=560, env={**os.environ, "PYTHONPATH": str(_ROOT)}
    )
    return result.returncode, result.stdout, result.stderr


_OPEN = """
    import sys, threading, time, numpy
    from swapper.backends import AiofilesBackend, Direction
    from swapper.backends.file_transfer import FileTransfer
    from swapper.testing.conformance import aligned_bytes, start
    from swapper.volumes.volume import Volume
    backend = AiofilesBackend(Volume([sys.argv[1]], 1 << 20, direct=False), 2)
    data = aligned_bytes(4096)
    start(backend, Direction.WRITE, 0, data).require_whole(4096)
"""


def test_a_process_that_closes_nothing_ends_without_a_word(tmp_path: Path) -> None:
    code, out, err = _run(_OPEN + "    late = [start(backend, Direction.READ, 0, data) for _ in range(20)]", tmp_path)
    assert (code, out, err) == (0, "", "")


@pytest.mark.deep
def test_what_runs_when_the_process_ends_is_carried_out(tmp_path: Path) -> None:
    slow = """
    real = FileTransfer.__call__
    FileTransfer.__call__ = lambda *arguments: time.sleep(0.5) or real(*arguments)
    def tell(request, transferred_bytes, error):
        sys.stdout.write(f"{transferred_bytes} {error}")
        sys.stdout.flush()
    from swapper.backends import IORequest
    backend.submit(IORequest(Direction.WRITE, 0, data.data, data.__array_interface__["data"][0], tell))
    """
    assert _run(_OPEN + slow, tmp_path) == (0, "4096 None", "")


@pytest.mark.deep
def test_a_hung_drive_does_not_keep_the_process(tmp_path: Path) -> None:
    hang = """
    FileTransfer.__call__ = lambda *_: time.sleep(300)
    backend.close(1.0)
    backend = AiofilesBackend(Volume([sys.argv[1]], 1 << 20, direct=False), 1)
    hung = [start(backend, Direction.READ, 0, data) for _ in range(3)]
    """
    started = time.monotonic()
    code, out, err = _run(_OPEN + hang, tmp_path)
    assert (code, out, err) == (0, "", "")
    assert time.monotonic() - started < 60


@pytest.mark.deep
def test_a_forked_child_neither_hangs_nor_disturbs(tmp_path: Path) -> None:
    fork = """
    import os, gc, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # since 3.12, of fork beside threads
    pid = os.fork()
    if not pid:
        assert backend.close(0.1)
        del backend
        gc.collect()
        sys.exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    start(backend, Direction.READ, 0, data).require_whole(4096)
    assert backend.close(5.0)
    print(status)
    """
    assert _run(_OPEN + fork, tmp_path) == (0, "7\n", "")


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
    monkeypatch.setattr("swapper.volumes.scratch_file._O_DIRECT", 0)
    with caplog.at_level(logging.INFO, "swapper"):
        assert _opened(Volume([tmp_path], ALIGNMENT)) == "AiofilesBackend"
    (line,) = [record.message for record in caplog.records if record.name == "swapper.measure.choice"]
    assert line.startswith("aiofiles is used: ") and line.endswith("page cache: this platform has no O_DIRECT")
