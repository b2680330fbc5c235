"""Which backend a config gets: by name or not at all, or automatically the one that proves itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swapper import (
    ALIGNMENT,
    BackendUnavailableError,
    Directory,
    Swapper,
    SwapperConfig,
    SwapperError,
    Volume,
    VolumeTooSmallError,
)
from swapper.backend import IOBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring import ring as ring_module
from swapper.backends.uring.backend import UringBackend
from swapper.backends.uring.ring import library
from swapper.measure import by_name as by_name_module
from swapper.measure import choice as choice_module
from swapper.measure.choice import measure_gain, open_backend
from tests.conformance.suite import random_bytes, read, write
from tests.unit.fake_drive import FakeDrive
from tests.uring import fixed_transfers, needs_uring

_MIB = 1 << 20
_SECONDS = 20.0
_WON = (True, "it is 1.50 times as fast as worker threads")
_LOST = (False, "it is 0.90 times as fast as worker threads")

_Opener = Callable[..., IOBackend]


@pytest.fixture
def open_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[_Opener]:
    """Opens backends on small volumes as if they were large, with a comparison that io_uring always wins."""
    monkeypatch.setattr(choice_module, "_LEAST_BYTES", 0)
    monkeypatch.setattr(choice_module, "_compared", {})
    monkeypatch.setattr(choice_module, "measure_gain", lambda *_: _WON)
    caplog.set_level(logging.INFO, "swapper.measure.choice")
    opened: list[IOBackend] = []

    def open_one(capacity_bytes: int = _MIB, **settings: object) -> IOBackend:
        volume = Volume([tmp_path], capacity_bytes, direct=settings.get("direct", True) is True)
        try:
            opened.append(open_backend(volume, SwapperConfig(**settings)))  # type: ignore[arg-type]
        except BaseException:
            volume.close()
            raise
        return opened[-1]

    yield open_one
    for backend in opened:
        assert backend.close(_SECONDS)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("swapper-")]


def _line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if record.name == "swapper.measure.choice"]
    return record


# -- by name -------------------------------------------------------------------------------------------------------------


@needs_uring
@pytest.mark.parametrize(("code", "cure"), [(errno.EPERM, "kernel.io_uring_disabled"), (errno.ENOSYS, "5.11 or newer")])
def test_uring_by_name_is_an_error_with_a_cure_where_it_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, cure: str
) -> None:
    monkeypatch.setattr(library(), "queue_init", lambda *_: -code)
    with pytest.raises(
        BackendUnavailableError, match=f"'uring' cannot be used.*{errno.errorcode[code]}.*{cure}"
    ) as caught:
        Swapper.open([tmp_path], _MIB, SwapperConfig(backend="uring"))
    assert isinstance(caught.value, SwapperError)
    assert (caught.value.backend, cure in caught.value.cure) == ("uring", True)
    assert os.listdir(tmp_path) == []


@needs_uring
def test_what_lies_in_the_volume_stays_as_it_is(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(paths, 3 * _MIB, stripe_bytes=64 << 10)
    contents = [random_bytes(file.num_bytes, seed) for seed, file in enumerate(volume.files)]
    for file, content in zip(volume.files, contents, strict=True):
        os.pwritev(file.fd, [content.data], 0)
    fixed = fixed_transfers(monkeypatch)
    backend = open_backend(volume, SwapperConfig(backend="uring"))
    assert isinstance(backend, UringBackend) and len(fixed) == 2 * len(paths), "each file is tried"
    for file, content in zip(volume.files, contents, strict=True):
        now = random_bytes(file.num_bytes, 99)
        os.preadv(file.fd, [now.data], 0)
        assert np.array_equal(now, content)
    backend.close(_SECONDS)


@needs_uring
def test_files_that_outlive_the_process_are_not_written_to(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before their bytes are put back would damage what a durable run goes on from."""
    tried: list[Volume] = []
    real = by_name_module.find_fault

    def find_fault(backend: UringBackend) -> str:
        tried.append(backend.volume)
        return real(backend)

    monkeypatch.setattr(by_name_module, "find_fault", find_fault)
    volume = Volume(paths, 3 * _MIB, stripe_bytes=64 << 10, file_name="states")
    backend = open_backend(volume, SwapperConfig(backend="uring"))
    (scratch,) = tried
    assert scratch is not volume and [file.directory for file in scratch.files] == paths
    assert [file.fd for file in scratch.files] == [-1] * 3
    data = random_bytes(64 << 10, 1)
    copy = np.zeros_like(data)
    write(backend, 0, data)
    read(backend, 0, copy)
    assert np.array_equal(data, copy)
    backend.close(_SECONDS)
    monkeypatch.setattr(by_name_module, "Volume", _no_room)
    again = contextlib.closing(Volume(paths, 3 * _MIB, stripe_bytes=64 << 10, file_name="states"))
    refused = pytest.raises(BackendUnavailableError, match=r"self-test has no room: .*; make some, or choose another")
    with again as volume, refused:
        open_backend(volume, SwapperConfig(backend="uring"))


def _no_room(directories: list[Path], num_bytes: int, **_: object) -> Volume:
    raise VolumeTooSmallError(directories[0], num_bytes, 0)


# -- automatically -------------------------------------------------------------------------------------------------------


def test_a_small_volume_gets_threads_without_any_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice_module, "measure_gain", None)
    caplog.set_level(logging.INFO)
    with Swapper.open([tmp_path], _MIB) as swapper:
        assert isinstance(swapper.backend, ThreadsBackend)
    assert "1048576 bytes is too small to be worth a comparison" in _line(caplog).message


@needs_uring
@pytest.mark.parametrize(
    ("result", "words"), [(_WON, "io_uring is used"), (_LOST, "worker threads are used and not io_uring")]
)
def test_a_comparison_decides_and_is_made_once_per_process_drive_and_setting(
    open_one: _Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    result: tuple[bool, str],
    words: str,
) -> None:
    compared: list[SwapperConfig] = []

    def count(directories: list[Directory], config: SwapperConfig) -> tuple[bool, str]:
        compared.append(config)
        return result

    monkeypatch.setattr(choice_module, "measure_gain", count)
    data = random_bytes(ALIGNMENT, 1)
    write(open_one(), 0, data)  # its files are open
    assert _line(caplog).message == f"{words}: {result[1]}"
    loser = "swapper-io" if result[0] else "swapper-ring"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(loser)], "the loser stays"
    kinds = {type(open_one()) for _ in range(3)}
    assert len(compared) == 1 and kinds == {UringBackend if result[0] else ThreadsBackend}
    open_one(request_bytes=4 * _MIB)
    open_one(max_inflight=3)
    open_one(deadline_seconds=7.0)
    assert len(compared) == 3


@needs_uring
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EACCES])
def test_a_forbidden_ring_gives_threads_and_one_line_that_says_why(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(library(), "queue_init", lambda *_: -code)
    assert isinstance(open_one(), ThreadsBackend)
    record = _line(caplog)
    assert record.levelno == logging.WARNING
    assert "worker threads are used" in record.message and errno.errorcode[code] in record.message


def test_a_package_that_is_not_installed_gives_threads_and_one_quiet_line(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    library.cache_clear()
    monkeypatch.setattr(ring_module.importlib, "import_module", import_module)
    assert isinstance(open_one(), ThreadsBackend)
    record = _line(caplog)
    assert record.levelno == logging.INFO
    assert "is not installed" in record.message and "pip install 'infinity-offload[uring]'" in record.message


_Prepare = Callable[..., None]


def _write_elsewhere(prepare: _Prepare) -> _Prepare:
    return lambda entry, fd, at, length, offset, *slot: prepare(entry, fd, at, length, offset + ALIGNMENT, *slot)


def _read_too_little(prepare: _Prepare) -> _Prepare:
    return lambda entry, fd, at, length, offset, *slot: prepare(entry, fd, at, length // 2, offset, *slot)


@needs_uring
@pytest.mark.parametrize(
    ("functions", "direction", "fault", "message"),
    [
        ("prepare", 1, _write_elsewhere, "ordinary memory failed: 16.* of 16384 bytes written to the scratch file"),
        ("prepare", 0, _read_too_little, "ordinary memory failed: a read moved 8192 of 16384 bytes"),
        ("prepare_fixed", 1, _write_elsewhere, "registered memory failed: 16.* of 16384 bytes written to the scratch"),
    ],
)
def test_a_failed_self_test_gives_threads_and_one_line_that_says_why(
    open_one: _Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    functions: str,
    direction: int,
    fault: Callable[[_Prepare], _Prepare],
    message: str,
) -> None:
    broken = list(getattr(library(), functions))
    broken[direction] = fault(broken[direction])
    monkeypatch.setattr(library(), functions, tuple(broken))
    assert isinstance(open_one(), ThreadsBackend)
    assert _line(caplog).levelno == logging.WARNING
    caplog.clear()
    with pytest.raises(BackendUnavailableError, match=message):
        open_one(backend="uring")


@needs_uring
def test_a_trial_run_that_fails_gives_threads_and_is_tried_again_next_time(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise SwapperError("the drive is gone")

    monkeypatch.setattr(choice_module, "measure_gain", fail)
    assert isinstance(open_one(), ThreadsBackend)
    assert "a trial run failed (the drive is gone)" in _line(caplog).message
    monkeypatch.setattr(choice_module, "measure_gain", lambda *_: _WON)
    assert isinstance(open_one(), UringBackend)


# -- the comparison ------------------------------------------------------------------------------------------------------

_SPEED = 2e9


@pytest.mark.parametrize(("gain", "is_faster"), [(2.0, True), (1.1, True), (1.01, False), (0.5, False)])
@pytest.mark.parametrize("request_bytes", [_MIB, 64 * _MIB])
def test_the_faster_one_is_found(
    gain: float, is_faster: bool, request_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = FakeDrive(lambda setting: _SPEED * {"threads": 1.0, "uring": gain}[setting.backend])
    monkeypatch.setattr(choice_module, "DriveTest", drive)
    took, reason = measure_gain([Directory(Path("."))], SwapperConfig(request_bytes=request_bytes))
    assert took is is_faster
    assert f"it is {gain:.2f} times as fast as worker threads" in reason
    assert all(setting.request_bytes * setting.max_inflight <= 64 * _MIB for setting, _ in drive.measured)
    order = [setting.backend for setting, _ in drive.measured[1:]]
    assert order[:4] in (["threads", "uring", "uring", "threads"], ["uring", "threads", "threads", "uring"])


@pytest.mark.parametrize(("fill_share", "speed"), [(1.0, 150e6), (1e-6, _SPEED)])
def test_a_slow_drive_ends_the_comparison_at_once(
    fill_share: float, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = FakeDrive(lambda setting: speed)
    drive.fill_share = fill_share
    monkeypatch.setattr(choice_module, "DriveTest", drive)
    monkeypatch.setattr(choice_module.time, "perf_counter", iter([0.0, 0.5]).__next__)
    took, reason = measure_gain([Directory(Path("."))], SwapperConfig())
    assert not took and "worker threads keep up with a drive of" in reason
    assert len(drive.measured) == (fill_share == 1.0)
