"""Settings come from a measurement: the right ones win, they are kept, and nothing that goes wrong stops training."""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.machine.autotune as autotune_module
import infinity.machine.bandwidth_cache as measured_module
import infinity.machine.drive_profile as profile_module
from infinity.config import InfinityConfig, load_config
from infinity.config.resolved import IOSection
from infinity.machine.autotune import tune_io
from infinity.machine.bandwidth_cache import BandwidthCache, cache_key, cache_path, load, measured_bandwidth, store
from infinity.machine.drive_profile import AT_START, candidates, choose
from infinity.plan.machine import Bandwidth
from swapper import ArgumentError, BackendUnavailableError, TransferError
from swapper.measure.measurement import IOSetting, Sample, Workload
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive, describe_drive
from tests.unit.machine.fake_drive import FakeDrive, Speed

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept, instead of in the home directory of whoever runs the tests."""
    monkeypatch.setenv("INFINITY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "io.json"


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory


def _config(nvme: Path | list[Any], autotune: object = "auto", **more: Any) -> InfinityConfig:
    path = nvme if isinstance(nvme, list) else str(nvme)
    return load_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": path}},
            "infinity": {"autotune_io": autotune, **more.pop("infinity", {})},
            **more,
        }
    )


def _forbidden(*backends: str) -> dict[str, Exception]:
    return {name: BackendUnavailableError(name, "it is forbidden here", "allow it") for name in backends}


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDrive]:
    fake = FakeDrive(errors=_forbidden("uring"))
    monkeypatch.setattr(profile_module, "DriveTest", fake)
    yield fake
    assert fake.num_open == 0, "a test file was left open"


def _likes(**wanted: object) -> Speed:
    """A drive that is twice as fast with one kind of setting."""
    return lambda setting: 2e9 if all(getattr(setting, name) == value for name, value in wanted.items()) else 1e9


def _decided(config: InfinityConfig) -> dict[str, tuple[object, str]]:
    return {key: (value, who) for key, value, who in config.decisions}


# -------------------------------------------------------------------------------------------------------------- choice


def _sample(speed: float, cpu: float = 0.1, request: int = MIB, threads: int = 4) -> Sample:
    half = int(speed / 2)
    return Sample(IOSetting("threads", request, threads, threads), Workload.MIXED, half, half, 1.0, cpu)


@pytest.mark.parametrize(
    ("best", "other"),
    [
        (_sample(1.04e9, cpu=0.9, request=8 * MIB), _sample(1e9, cpu=0.01)),
        (_sample(0.98e9, cpu=0.1, request=8 * MIB), _sample(1e9, cpu=0.2)),
        (_sample(0.98e9, cpu=0.1), _sample(1e9, cpu=0.098, threads=16)),
    ],
    ids=["the fastest", "of equals the cheapest", "then the one with fewest bytes in flight"],
)
def test_what_wins(best: Sample, other: Sample) -> None:
    assert choose([best, other]) is choose([other, best]) is best


def _io(**given: Any) -> IOSection:
    section = IOSection(MIB, 4, 32, 120.0, True, given=frozenset(given))
    return replace(section, **given)


def test_candidates_cover_sizes_depths_and_backends() -> None:
    found = candidates(_io(), ("threads", "uring"), 64 * MIB)
    assert len(set(found)) == len(found) <= 24
    assert {each.backend for each in found} == {"threads", "uring"}
    assert {each.request_bytes for each in found} == {MIB, 2 * MIB, 4 * MIB, 8 * MIB}
    assert all(each.bytes_inflight <= 64 * MIB for each in found)
    assert [each.bytes_inflight for each in found] == sorted(each.bytes_inflight for each in found)


def test_candidates_keep_to_what_is_given() -> None:
    both = ("threads", "uring")
    assert {each.request_bytes for each in candidates(_io(request_bytes=3 * MIB), both, 64 * MIB)} == {3 * MIB}
    assert {each.backend for each in candidates(_io(backend="uring"), both, 64 * MIB)} == {"uring"}
    threads = [each for each in candidates(_io(num_threads=6), both, 64 * MIB) if each.backend == "threads"]
    assert {each.num_threads for each in threads} == {6}
    # The config counts the depth per thread.
    deep = candidates(_io(max_inflight=64), both, 1 << 40)
    assert {each.max_inflight for each in deep if each.backend == "uring"} == {64}
    assert {each.max_inflight // each.num_threads for each in deep if each.backend == "threads"} == {16}
    all_given = _io(request_bytes=MIB, num_threads=4, max_inflight=32, backend="threads")
    assert candidates(all_given, both, 64 * MIB) == [IOSetting("threads", MIB, 4, 32)]


def test_candidates_for_several_drives_keep_all_of_them_busy() -> None:
    found = candidates(_io(), ("threads", "uring"), 128 * MIB, 3)
    for each in found:
        if each.has_threads:  # each drive has so many
            assert each.max_inflight >= 1.5 * each.num_threads * 3
            assert each.request_bytes * each.num_threads * 3 <= 128 * MIB
        else:
            assert each.max_inflight in (24, 48, 96) and each.bytes_inflight <= 128 * MIB


# ------------------------------------------------------------------------------------------------------------- tune_io


@pytest.mark.parametrize("autotune", [False, "false", None])
def test_nothing_is_measured_unless_asked_for(nvme: Path, drive: FakeDrive, autotune: object) -> None:
    config = _config(nvme, autotune)
    assert tune_io(config) is config
    assert not drive.opened


def test_the_best_setting_is_used_and_everybody_is_told(
    nvme: Path, drive: FakeDrive, caplog: pytest.LogCaptureFixture
) -> None:
    drive.speed = _likes(request_bytes=4 * MIB, num_threads=8)
    with caplog.at_level(logging.INFO):
        config = tune_io(_config(nvme))
    io = config.io
    assert (io.request_bytes, io.num_threads, io.max_inflight, io.backend) == (4 * MIB, 8, 8, "threads")
    today = f"measured on {measured_module.now()[:10]}"
    decided = _decided(config)
    assert decided["aio.block_size"] == (4 * MIB, today)
    assert decided["aio.intra_op_parallelism"] == (8, today)
    assert decided["aio.queue_depth"] == ("8 requests in flight", today)
    assert decided["infinity.io_backend"] == ("threads", today)
    assert decided["infinity.autotune_io"] == ("once", "config")
    assert today in config.describe()
    assert "threads, 4 MiB x 8 in flight is best: 2.00 GB/s" in caplog.text
    # The other sections are as they were.
    assert replace(config, io=None, decisions=()) == replace(_config(nvme), io=None, decisions=())  # type: ignore[arg-type]


def test_a_backend_that_does_not_work_is_left_out(nvme: Path, drive: FakeDrive) -> None:
    drive.speed = _likes(backend="uring")
    assert tune_io(_config(nvme)).io.backend == "threads"
    assert sum(setting.backend == "uring" for setting, _ in drive.measured) == 1, "it was tried again and again"
    drive.errors = {}
    tuned = tune_io(_config(nvme, True))
    assert tuned.io.backend == "uring"
    # The ring has no threads: what the table says about them was not measured.
    assert _decided(tuned)["aio.intra_op_parallelism"] == (4, "default")


def test_once_means_once_and_true_measures_again(
    nvme: Path, drive: FakeDrive, caplog: pytest.LogCaptureFixture
) -> None:
    drive.speed = _likes(request_bytes=8 * MIB, num_threads=4)
    first = tune_io(_config(nvme))
    drive.speed = _likes(request_bytes=MIB, num_threads=16)
    with caplog.at_level(logging.INFO):
        assert tune_io(_config(nvme)) == first
    assert len(drive.opened) == 1
    assert f"as measured on {measured_module.now()[:10]}: threads, 8 MiB x 4 in flight" in caplog.text
    for asked in (True, "auto"):  # the first stores what it finds
        assert tune_io(_config(nvme, asked)).io.num_threads == 16
        assert len(drive.opened) == 2


def test_what_the_user_wrote_stays(nvme: Path, drive: FakeDrive, caplog: pytest.LogCaptureFixture) -> None:
    drive.speed = _likes(request_bytes=4 * MIB)
    config = _config(nvme, aio={"block_size": "2MiB", "queue_depth": "auto"})
    with caplog.at_level(logging.INFO):
        tuned = tune_io(config)
    assert tuned.io.request_bytes == 2 * MIB
    assert {setting.request_bytes for setting, _ in drive.measured} == {2 * MIB}
    decided = _decided(tuned)
    assert decided["aio.block_size"] == (2 * MIB, "config")
    assert decided["aio.queue_depth"][1].startswith("measured on ")
    assert "aio.block_size stays as the config says" in caplog.text
    # A result for other givens is another result.
    assert tune_io(_config(nvme)).io.request_bytes == 4 * MIB


def test_a_stored_backend_that_fails_here_is_measured_again(
    nvme: Path, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody measured outside of a container, and inside io_uring is forbidden."""
    drive.errors, drive.speed = {}, _likes(backend="uring")
    assert tune_io(_config(nvme)).io.backend == "uring"
    drive.errors = _forbidden("uring")

    def refuse(*arguments: object) -> None:
        raise BackendUnavailableError("uring", "a seccomp filter forbids it", "allow it")

    monkeypatch.setattr(autotune_module.Swapper, "open", refuse)
    with caplog.at_level(logging.INFO):
        assert tune_io(_config(nvme)).io.backend == "threads"
    assert "a seccomp filter forbids it" in caplog.text


# --------------------------------------------------------------------------------------------------------------- space


def _with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: dict[str, int], device: Callable[[str], int]) -> None:
    def described(path: Path) -> Drive:
        drive = describe_drive(path)
        return replace(drive, free_bytes=free_bytes[path.name], device_number=device(path.name))

    monkeypatch.setattr(profile_module, "describe_drive", described)


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 1 << 30), (1 << 30, (1 << 30) // 2)])
def test_the_test_file_is_small(
    nvme: Path, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    _with_free(monkeypatch, {"nvme": free}, lambda name: 1)
    tune_io(_config(nvme))
    ((directories, file_bytes, options),) = drive.opened
    assert file_bytes == expected
    assert directories == [Directory(nvme, capacity_bytes=expected)]
    assert options["direct"] is True


@pytest.mark.parametrize("free", [0, 100 << 20])
def test_too_little_space_is_refused_politely(
    nvme: Path, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    _with_free(monkeypatch, {"nvme": free}, lambda name: 1)
    config = _config(nvme)
    assert tune_io(config) is config
    assert not drive.opened
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "defaults are used" in record.message and "free some space" in record.message


# --------------------------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    "problem",
    [
        TransferError("write", "x", "a file", 0, 1, 5, "failed"),
        OSError(5, "Input/output error"),
        ArgumentError("wrong"),
        MemoryError(),
        ZeroDivisionError("a bug"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_no_failure_stops_training(
    nvme: Path, drive: FakeDrive, caplog: pytest.LogCaptureFixture, problem: Exception, cache: Path
) -> None:
    drive.problem = problem
    config = _config(nvme)
    assert tune_io(config) is config
    assert "the drives were not measured, so defaults are used" in caplog.text
    assert not cache.exists(), "a failure was kept"


# ----------------------------------------------------------------------------------------------------------------- cache

_BANDWIDTH = Bandwidth(1e9, 2e9, 1.5e9, "2026-01-02T03:04:05+00:00")
_MEASURED = BandwidthCache(IOSetting("threads", MIB, 4, 4), _BANDWIDTH, 0.25)


def _entry(**changes: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "setting": {"backend": "threads", "request_bytes": MIB, "num_threads": 4, "max_inflight": 4},
        "bandwidth": {
            "read_bytes_per_second": 1e9,
            "write_bytes_per_second": 1e9,
            "mixed_bytes_per_second": 1e9,
            "measured_at": "2026-01-02T03:04:05+00:00",
        },
        "cpu_cores": 0.1,
    }
    for name, value in changes.items():
        block = next((block for block in (entry["setting"], entry["bandwidth"]) if name in block), entry)
        block[name] = value
    return entry


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 1, "measured": []}',
        '{"format": 2, "measured": {}}',
        "[" * 100_000,
        "\0\xff",
        " " * (2 << 20),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_damaged_is_replaced(
    nvme: Path, drive: FakeDrive, cache: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    cache.parent.mkdir()
    cache.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.INFO):
        assert tune_io(_config(nvme)).io.given == frozenset()
    assert "the file of measured I/O settings is not used" in caplog.text
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    assert len(drive.opened) == 1
    tune_io(_config(nvme))
    assert len(drive.opened) == 1


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        {},
        _entry(request_bytes=-MIB),
        _entry(request_bytes=1000),
        _entry(request_bytes=1e6),
        _entry(request_bytes="1MiB"),
        _entry(num_threads=0),
        _entry(num_threads=True),
        _entry(backend="threadz"),
        _entry(backend=["threads"]),
        _entry(more=1),
        _entry(setting=[]),
        _entry(setting={"backend": "threads"}),
        _entry(cpu_cores="many"),
        _entry(read_bytes_per_second=0),
        _entry(mixed_bytes_per_second=float("nan")),
        _entry(measured_at="yesterday"),
        _entry(measured_at=None),
    ],
    ids=str,
)
def test_an_entry_that_is_damaged_is_replaced(nvme: Path, drive: FakeDrive, cache: Path, entry: Any) -> None:
    tune_io(_config(nvme))
    content = json.loads(cache.read_text())
    (key,) = content["measured"]
    content["measured"][key] = entry
    cache.write_text(json.dumps(content))
    is_fine = isinstance(entry, dict) and "more" in entry
    assert (measured_bandwidth([nvme]) is not None) == is_fine
    tune_io(_config(nvme))
    assert len(drive.opened) == (1 if is_fine else 2)
    assert measured_bandwidth([nvme]) is not None


def test_a_file_that_cannot_be_written_costs_a_line(
    tmp_path: Path, nvme: Path, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "blocker"
    blocker.touch()
    monkeypatch.setenv("INFINITY_CACHE_DIR", str(blocker / "below"))
    drive.speed = _likes(request_bytes=4 * MIB)
    with caplog.at_level(logging.INFO):
        assert tune_io(_config(nvme)).io.request_bytes == 4 * MIB
    assert "not kept for the next run" in caplog.text
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_where_the_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_path() == tmp_path / "cache" / "io.json"
    monkeypatch.delenv("INFINITY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path() == tmp_path / "xdg" / "infinity" / "io.json"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_path() == tmp_path / ".cache" / "infinity" / "io.json"


def _key(nvme: Path, asked: str = "") -> str:
    return cache_key([nvme], "1.0", asked)


def test_a_result_comes_back_as_it_was(nvme: Path) -> None:
    assert load(_key(nvme)) is None
    store(_key(nvme), _MEASURED)
    assert load(_key(nvme)) == _MEASURED
    assert _MEASURED.bandwidth.date == "2026-01-02"


def _on_device(status: os.stat_result, number: int) -> os.stat_result:
    return os.stat_result((*status[:2], number, *status[3:]))


def test_a_result_holds_for_one_machine_kernel_version_and_set_of_drives(
    tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(_key(nvme), _MEASURED)
    other = tmp_path / "other"
    other.mkdir()
    assert load(_key(other)) is None
    assert load(cache_key([nvme, other], "1.0", "")) is None
    assert load(cache_key([nvme], "1.1", "")) is None
    assert load(_key(nvme, "given: request_bytes=4096")) is None
    (tmp_path / "link").symlink_to(nvme)
    assert load(_key(tmp_path / "link")) == _MEASURED
    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", lambda: "9.9")
        assert load(_key(nvme)) is None and measured_bandwidth([nvme]) is None
    with monkeypatch.context() as patch:
        patch.setattr(measured_module, "_MACHINE_ID", tmp_path / "none")
        patch.setattr(platform, "node", lambda: "elsewhere")
        assert load(_key(nvme)) is None
    with monkeypatch.context() as patch:
        real = os.stat
        patch.setattr(measured_module.os, "stat", lambda path, **o: _on_device(real(path, **o), 77))
        assert load(_key(nvme)) is None, "another drive was mounted there"
    assert load(_key(nvme)) == _MEASURED


def test_bandwidth_is_that_of_the_last_measurement(tmp_path: Path, nvme: Path) -> None:
    assert measured_bandwidth([nvme]) is None
    store(_key(nvme, "a"), _MEASURED)
    newer = replace(_BANDWIDTH, mixed_bytes_per_second=9e9, measured_at="2026-02-02T00:00:00+00:00")
    store(_key(nvme, "b"), replace(_MEASURED, bandwidth=newer))
    store(_key(nvme, "c"), replace(_MEASURED, bandwidth=replace(newer, measured_at="2025-12-31T00:00:00+00:00")))
    assert measured_bandwidth([nvme]) == newer
    assert measured_bandwidth([tmp_path]) is None
    assert measured_bandwidth([tmp_path / "missing"]) is None


# ---------------------------------------------------------------------------------------------------------- for real

_SHORT = replace(AT_START, seconds=0.5, fill_seconds=30.0, sample_seconds=0.01, file_bytes=64 << 20)


def test_a_real_measurement_leaves_only_its_result(nvme: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune_module, "AT_START", _SHORT)
    config = tune_io(_config(nvme, aio={"block_size": MIB}))
    assert os.listdir(nvme) == []
    bandwidth = measured_bandwidth([nvme])
    assert bandwidth is not None and min(bandwidth.read_bytes_per_second, bandwidth.write_bytes_per_second) > 0
    assert _decided(config)["infinity.io_backend"][1].startswith("measured on ")
    assert cache.stat().st_size < 4096
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("swapper")]


def test_the_time_is_bounded_on_a_slow_drive(nvme: Path, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement takes as long as its bytes in flight need: at 20 MB/s, 64 MiB are three seconds."""
    now = 1000.0
    monkeypatch.setattr(profile_module.time, "monotonic", lambda: now)
    real = drive.measure

    def slow(setting: IOSetting, workload: Workload, seconds: float) -> Sample:
        nonlocal now
        now += seconds + setting.bytes_inflight / 20e6
        return real(setting, workload, seconds)

    drive.measure = slow  # type: ignore[method-assign]
    drive.speed = lambda setting: 20e6
    tune_io(_config(nvme))
    assert measured_bandwidth([nvme]) is not None
    assert now - 1000 < 2 * AT_START.seconds


def test_the_engine_takes_the_measured_settings(nvme: Path, drive: FakeDrive) -> None:
    drive.speed = _likes(request_bytes=2 * MIB, num_threads=8)
    raw = {
        "train_batch_size": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)}},
        "infinity": {"autotune_io": "auto", "host_memory_budget": "256MiB"},
    }
    engine, *_ = infinity.initialize(model=nn.Linear(8, 8), config=raw, device="cpu")
    try:
        assert engine.config.io.request_bytes == 2 * MIB
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    finally:
        engine.close()


def test_what_was_profiled_is_used_by_configs_that_say_nothing(nvme: Path, drive: FakeDrive) -> None:
    drive.speed = _likes(request_bytes=4 * MIB, num_threads=8)
    tune_io(_config(nvme))  # it is stored as `infinity profile` stores what it has found
    assert drive.measured
    drive.measured.clear()
    found = tune_io(_config(nvme, False))
    assert (found.io.request_bytes, found.io.num_threads) == (4 * MIB, 8)
    assert "measured on" in str({each.key: each.decided_by for each in found.decisions}["aio.block_size"])
    narrow = _config(nvme, False, infinity={"host_memory_budget": "64MiB"})
    assert tune_io(narrow).io == narrow.io, "more would be in flight than an eighth of the budget"
    fixed = _config(nvme, False, aio={"block_size": 1 << 20})
    assert tune_io(fixed).io == fixed.io
    assert not drive.measured
