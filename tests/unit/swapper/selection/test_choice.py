"""Which backend a config gets: by name or not at all, or automatically the one that proves itself."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import swapper.selection.race as race_module
from swapper import (
    ALIGNMENT,
    AlignedRegion,
    BackendUnavailableError,
    StallError,
    Swapper,
    SwapperConfig,
    SwapperError,
    Volume,
)
from swapper.backend import IOBackend, IORequest
from swapper.backends.memory import MemoryBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring import ring as ring_module
from swapper.backends.uring.backend import UringBackend
from swapper.backends.uring.ring import library
from swapper.scheduling.scheduler import IOScheduler
from swapper.selection import choice as choice_module
from swapper.selection.choice import open_backend
from swapper.selection.race import RaceResult, race
from swapper.testing.conformance import random_bytes, read, write
from swapper.wrappers.base import BackendWrapper
from swapper.wrappers.faults import FaultInjectingBackend, FaultRule
from swapper.wrappers.rate_limit import RateLimitBackend
from tests.ticking import LONG_SECONDS, ticking
from tests.uring import needs_uring

_MIB = 1 << 20
_SECONDS = 20.0
_WON = RaceResult(True, "it is 1.50 times as fast as worker threads")
_LOST = RaceResult(False, "it is 0.90 times as fast as worker threads")

_Opener = Callable[..., IOBackend]


@pytest.fixture
def open_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[_Opener]:
    """Opens backends on small volumes as if they were large, with a race that io_uring always wins."""
    monkeypatch.setattr(choice_module, "MIN_CAPACITY_BYTES", 0)
    monkeypatch.setattr(choice_module, "_results", {})
    monkeypatch.setattr(choice_module, "race", lambda *_: _WON)
    caplog.set_level(logging.INFO, "swapper.selection.choice")
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
    (record,) = [record for record in caplog.records if record.name == "swapper.selection.choice"]
    return record


# -- by name -------------------------------------------------------------------------------------------------------------


def test_threads_by_name(open_one: _Opener, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_one(backend="threads", num_threads=3)
    assert isinstance(backend, ThreadsBackend) and backend.num_threads == 3
    assert not caplog.records


@needs_uring
def test_uring_by_name_is_not_compared_with_anything(open_one: _Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "race", None)
    backend = open_one(backend="uring", max_inflight=7)
    assert isinstance(backend, UringBackend) and backend.concurrency == 7
    assert isinstance(open_one(backend="uring", max_inflight=100_000), UringBackend)
    data = random_bytes(5 * ALIGNMENT + 3, 1)
    copy = np.zeros_like(data)
    write(backend, 100, data)
    read(backend, 100, copy)
    assert np.array_equal(data, copy)


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
def test_what_lies_in_the_volume_stays_as_it_is(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    volume = Volume(directories, 3 * _MIB, stripe_bytes=64 << 10)
    contents = [random_bytes(file.num_bytes, seed) for seed, file in enumerate(volume.files)]
    for file, content in zip(volume.files, contents, strict=True):
        os.pwritev(file.fd, [content.data], 0)
    backend = open_backend(volume, SwapperConfig(backend="uring"))
    assert isinstance(backend, UringBackend) and backend.num_fixed == 2 * len(directories), "each file is tried"
    for file, content in zip(volume.files, contents, strict=True):
        now = random_bytes(file.num_bytes, 99)
        os.preadv(file.fd, [now.data], 0)
        assert np.array_equal(now, content)
    backend.close(_SECONDS)


# -- automatically -------------------------------------------------------------------------------------------------------


def test_a_small_volume_gets_threads_without_any_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice_module, "race", None)
    monkeypatch.setattr(choice_module, "_open_uring", None)
    caplog.set_level(logging.INFO)
    with Swapper.open([tmp_path], _MIB) as swapper:
        assert isinstance(swapper.backend, ThreadsBackend)
    assert "1048576 bytes is too small for a comparison" in _line(caplog).message


@needs_uring
def test_uring_is_taken_if_it_works_and_wins(open_one: _Opener, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(open_one(), UringBackend)
    assert _line(caplog).message == f"io_uring is used: {_WON.reason}"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swapper-io")], "the loser stays"


@needs_uring
def test_threads_are_taken_if_uring_does_not_win(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice_module, "race", lambda *_: _LOST)
    backend = open_one()
    assert isinstance(backend, ThreadsBackend)
    assert _line(caplog).message == f"worker threads are used and not io_uring: {_LOST.reason}"
    assert not [thread for thread in threading.enumerate() if thread.name == "swapper-ring"], "the loser stays"
    data = random_bytes(ALIGNMENT, 1)
    write(backend, 0, data)  # its files are open


@needs_uring
@pytest.mark.parametrize("result", [_WON, _LOST])
def test_a_race_is_held_once_per_process_drive_and_setting(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, result: RaceResult
) -> None:
    races: list[SwapperConfig] = []

    def count(first: IOBackend, second: IOBackend, config: SwapperConfig) -> RaceResult:
        races.append(config)
        return result

    monkeypatch.setattr(choice_module, "race", count)
    kinds = {type(open_one()) for _ in range(3)}
    assert len(races) == 1 and kinds == {UringBackend if result.is_won else ThreadsBackend}
    open_one(request_bytes=4 * _MIB)
    open_one(max_inflight=3)
    open_one(deadline_seconds=7.0)
    assert len(races) == 3


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


def _shift_memory(prepare: _Prepare) -> _Prepare:
    return lambda entry, fd, at, length, offset, *slot: prepare(entry, fd, at + 512, length - 512, offset, *slot)


@needs_uring
@pytest.mark.parametrize(
    ("functions", "direction", "fault", "message"),
    [
        ("prepare", 1, _write_elsewhere, "ordinary memory failed: 16.* of 16384 bytes written to the scratch file"),
        ("prepare", 0, _read_too_little, "ordinary memory failed: a read moved 8192 of 16384 bytes"),
        ("prepare", 0, _shift_memory, "ordinary memory failed: a read"),
        (
            "prepare_fixed",
            0,
            _write_elsewhere,
            "registered memory failed: 16.* of 16384 bytes read from the scratch file",
        ),
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
def test_a_ring_that_does_not_answer_gives_threads(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from swapper.backends.uring import self_test as self_test_module

    monkeypatch.setattr(self_test_module, "_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(UringBackend, "submit", lambda *_: None)
    assert isinstance(open_one(), ThreadsBackend)
    assert "a write had no answer for 0.05 seconds" in _line(caplog).message


@needs_uring
def test_memory_that_cannot_be_registered_does_not_rule_uring_out(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library(), "register_sparse", lambda *_: -errno.EINVAL)
    assert isinstance(open_one(), UringBackend)
    assert "are not registered with io_uring" in caplog.text


@needs_uring
def test_a_trial_run_that_fails_gives_threads_and_is_tried_again_next_time(
    open_one: _Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> RaceResult:
        raise SwapperError("the drive is gone")

    monkeypatch.setattr(choice_module, "race", fail)
    assert isinstance(open_one(), ThreadsBackend)
    assert "a trial run failed (the drive is gone)" in _line(caplog).message
    monkeypatch.setattr(choice_module, "race", lambda *_: _WON)
    assert isinstance(open_one(), UringBackend)


def test_the_page_cache_gets_threads(open_one: _Opener, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(open_one(direct=False), ThreadsBackend)
    assert "some files go through the page cache" in _line(caplog).message


# -- the race ------------------------------------------------------------------------------------------------------------

_CAPACITY = 64 * _MIB


class _Counting(BackendWrapper):
    num_bytes = 0

    def submit(self, request: IORequest) -> None:
        self.num_bytes += len(request.memory)
        super().submit(request)


def _memory() -> MemoryBackend:
    return MemoryBackend(_CAPACITY, num_threads=2)


class _Clock:
    """Time that passes only while requests are handed over."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Timed(BackendWrapper):
    """Has a speed by a clock of the test's, whatever the machine does meanwhile."""

    def __init__(self, clock: _Clock, bytes_per_second: float) -> None:
        super().__init__(_memory())
        self._clock = clock
        self._bytes_per_second = bytes_per_second

    def submit(self, request: IORequest) -> None:
        self._clock.now += len(request.memory) / self._bytes_per_second  # only one thread of a race submits at a time
        super().submit(request)


@pytest.mark.parametrize(("gain", "is_won"), [(2.0, True), (1.1, True), (1.01, False), (0.5, False)])
def test_the_faster_one_wins_and_both_stay_open(gain: float, is_won: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(race_module, "time", clock)
    champion, challenger = _Timed(clock, 2e9), _Timed(clock, gain * 2e9)
    result = race(champion, challenger, SwapperConfig())
    assert result.is_won is is_won
    assert f"it is {gain:.2f} times as fast as worker threads" in result.reason
    for backend in (champion, challenger):
        write(backend, 0, random_bytes(ALIGNMENT, 0))
        assert backend.close(_SECONDS)


@pytest.mark.parametrize(("bytes_per_second", "num_written"), [(20e6, 4), (150e6, 52)])
def test_a_slow_drive_ends_the_race_after_a_few_bytes(bytes_per_second: float, num_written: int) -> None:
    champion, challenger = _Counting(RateLimitBackend(_memory(), 1e9, bytes_per_second)), _Counting(_memory())
    result = race(champion, challenger, SwapperConfig())
    assert not result.is_won and "worker threads keep up with a drive of" in result.reason
    assert champion.num_bytes <= (48 + num_written) * _MIB and challenger.num_bytes == 0
    for backend in (champion, challenger):
        backend.close(_SECONDS)


def _let_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a busy machine makes the champion."""
    for limit in ("_SLOW_BYTES_PER_SECOND", "_CRAWLING_BYTES_PER_SECOND"):
        monkeypatch.setattr(race_module, limit, 0.0)


@pytest.mark.parametrize("request_bytes", [64 << 10, 3 * _MIB, 16 * _MIB])
def test_a_race_leaves_the_content_as_it_was(request_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "_NUM_ROUNDS", 2)
    backend = _memory()
    content = random_bytes(_CAPACITY, 1)
    backend.region.array()[:] = content
    race(backend, backend, SwapperConfig(request_bytes=request_bytes))
    assert np.array_equal(backend.region.array(), content)
    backend.close(_SECONDS)


def test_a_race_gives_its_memory_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "_NUM_ROUNDS", 2)
    bases: list[weakref.ref[object]] = []

    class Region(AlignedRegion):
        def array(self) -> npt.NDArray[np.uint8]:
            array = super().array()
            bases.append(weakref.ref(array.base))  # which every view keeps alive
            return array

    monkeypatch.setattr(race_module, "AlignedRegion", Region)
    backend = _memory()
    gc.disable()  # which may come much later, or never
    try:
        race(backend, backend, SwapperConfig())
        assert [base() is None for base in bases] == [True, True]
    finally:
        gc.enable()
    backend.close(_SECONDS)


def test_a_failing_drive_ends_the_race_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _let_it_go_on(monkeypatch)
    challenger = FaultInjectingBackend(_memory(), [FaultRule(nth=20, errno=errno.EIO)])
    champion = _memory()
    with pytest.raises(SwapperError, match="EIO"):
        race(champion, challenger, SwapperConfig())
    for backend in (champion, challenger):
        backend.close(_SECONDS)


def test_a_drive_that_hangs_ends_the_race_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(race_module, "_DEADLINE_SECONDS", LONG_SECONDS)
    _let_it_go_on(monkeypatch)
    champion, challenger = _memory(), FaultInjectingBackend(_memory(), [FaultRule(nth=20, hangs=True)])
    schedulers: list[IOScheduler] = []

    def scheduler(*arguments: Any) -> IOScheduler:
        schedulers.append(IOScheduler(*arguments))
        return schedulers[-1]

    monkeypatch.setattr(race_module, "IOScheduler", scheduler)
    with ticking(challenger, lambda: schedulers), pytest.raises(StallError, match="saw no answer"):
        race(champion, challenger, SwapperConfig())
    assert "closed while transfers hang" in caplog.text
    challenger.release_hung()
    for backend in (champion, challenger):
        assert backend.close(_SECONDS)


@needs_uring
def test_a_real_race_on_a_real_drive(nvme_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "_results", {})
    config = SwapperConfig()
    with Swapper.open([nvme_dir], 256 * _MIB, config) as swapper:
        assert isinstance(swapper.backend, (ThreadsBackend, UringBackend))
        (result,) = choice_module._results.values()
        assert isinstance(swapper.backend, UringBackend) is result.is_won
        extent = swapper.allocate(_MIB, "x")
        data, copy = random_bytes(_MIB, 1), np.zeros(_MIB, dtype=np.uint8)
        swapper.write(extent, data)
        swapper.read(extent, copy).wait()
        assert np.array_equal(data, copy)
