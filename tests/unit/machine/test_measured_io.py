"""What `infinity profile` found is kept, engines take it, and nothing that goes wrong stops training."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.machine.bandwidth_cache as cache_module
import infinity.machine.drive_profile as profile_module
from infinity.config import InfinityConfig, load_config
from infinity.machine.bandwidth_cache import (
    BandwidthCache,
    cache_path,
    load,
    measured_bandwidth,
    store,
    with_measured_io,
)
from infinity.machine.drive_profile import QUICK, DriveProfile, choose, drive_test
from infinity.plan.machine import Bandwidth
from swapper import BackendUnavailableError
from swapper.measure.measurement import IOSetting, Sample, Workload
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive, describe_drive
from tests.unit.fake_drive import FakeDrive

MIB = 1 << 20
_BANDWIDTH = Bandwidth(1e9, 2e9, 1.5e9, "2026-01-02T03:04:05+00:00")
_MEASURED = BandwidthCache(IOSetting("threads", 4 * MIB, 8, 8), _BANDWIDTH, 0.25)


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


def _config(nvme: Path, **more: Any) -> InfinityConfig:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)}}
    return load_config({"train_batch_size": 1, "zero_optimization": zero, **more})


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


# --------------------------------------------------------------------------------------------------- what engines take


def test_what_was_profiled_is_used_and_everybody_is_told(nvme: Path) -> None:
    store([nvme], _MEASURED)
    config = with_measured_io(_config(nvme))
    io = config.io
    assert (io.request_bytes, io.num_threads, io.max_inflight, io.backend) == (4 * MIB, 8, 8, "threads")
    decided, who = _decided(config), "measured on 2026-01-02"
    assert decided["aio.block_size"] == (4 * MIB, who)
    assert decided["aio.intra_op_parallelism"] == (8, who)
    assert decided["aio.queue_depth"] == ("8 requests in flight", who)
    assert decided["infinity.io_backend"] == ("threads", who)
    assert who in config.describe()
    # The other sections are as they were.
    assert replace(config, io=None, decisions=()) == replace(_config(nvme), io=None, decisions=())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [
        {"aio": {"block_size": "1MiB"}},
        {"aio": {"queue_depth": 8}},
        {"aio": {"thread_count": 4}},
        {"infinity": {"io_backend": "threads"}},
        {"infinity": {"direct_io": False}},
        {"infinity": {"host_memory_budget": "128MiB"}},
        {"zero_optimization": {}},
    ],
    ids=str,
)
def test_a_config_that_says_something_else_stays_as_it_is(nvme: Path, more: dict[str, Any]) -> None:
    store([nvme], _MEASURED)
    config = _config(nvme, **more)
    assert with_measured_io(config) is config
    assert with_measured_io(_config(nvme, infinity={"host_memory_budget": "256MiB"})).io.num_threads == 8


def test_drives_that_were_never_measured_have_the_defaults(tmp_path: Path, nvme: Path) -> None:
    store([tmp_path], _MEASURED)
    config = _config(nvme)
    assert with_measured_io(config) is config


@pytest.mark.parametrize("request_bytes", [4 * MIB, 1000])
def test_settings_that_do_not_work_here_are_left(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request_bytes: int
) -> None:
    """Somebody measured outside of a container, and inside io_uring is forbidden; or has edited the file."""

    def refuse(*arguments: object) -> None:
        raise BackendUnavailableError("uring", "a seccomp filter forbids it", "allow it")

    monkeypatch.setattr(cache_module.Swapper, "open", refuse)
    store([nvme], replace(_MEASURED, setting=IOSetting("uring", request_bytes, 4, 8)))
    config = _config(nvme)
    with caplog.at_level(logging.INFO):
        assert with_measured_io(config) is config
    assert ("a seccomp filter" if request_bytes > 1000 else "4096") in caplog.text


def test_the_engine_takes_the_measured_settings(nvme: Path) -> None:
    store([nvme], _MEASURED)
    raw = {
        "train_batch_size": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)}},
        "infinity": {"host_memory_budget": "256MiB"},
    }
    with infinity.initialize(model=nn.Linear(8, 8), config=raw, device="cpu")[0] as engine:
        assert engine.config.io.request_bytes == 4 * MIB
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()


# --------------------------------------------------------------------------------------------------------------- space


def _with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: dict[str, int], device: Callable[[str], int]) -> None:
    def described(path: Path) -> Drive:
        drive = describe_drive(path)
        return replace(drive, free_bytes=free_bytes[path.name], device_number=device(path.name))

    monkeypatch.setattr(profile_module, "describe_drive", described)


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 512 << 20), (1 << 29, (1 << 29) // 2)])
def test_the_test_file_is_small(nvme: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    drive = FakeDrive()
    monkeypatch.setattr(profile_module, "DriveTest", drive)
    _with_free(monkeypatch, {"nvme": free}, lambda name: 1)
    with drive_test(DriveProfile([Directory(nvme)]), QUICK):
        ((directories, file_bytes, _),) = drive.opened
    assert file_bytes == expected
    assert directories == [Directory(nvme, capacity_bytes=expected)]


@pytest.mark.parametrize("free", [0, 100 << 20])
def test_too_little_space_is_refused_politely(nvme: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    _with_free(monkeypatch, {"nvme": free}, lambda name: 1)
    with pytest.raises(RuntimeError, match="free some space"), drive_test(DriveProfile([Directory(nvme)]), QUICK):
        pass


# ----------------------------------------------------------------------------------------------------------------- cache


def _written(cache: Path, **changes: Any) -> None:
    """The file with other values in its only entry."""
    content = json.loads(cache.read_text())
    (entry,) = content["measured"].values()
    for name, value in changes.items():
        block = next((block for block in (entry["setting"], entry["bandwidth"]) if name in block), entry)
        block[name] = value
    cache.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 100_000, "\0\xff", " " * (2 << 20)),
        *('{"format": 2}', '{"format": 2, "measured": []}', '{"format": 2, "measured": {"a": null}}'),
        '{"format": 1, "measured": {}}',
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_damaged_is_replaced(
    nvme: Path, cache: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    cache.parent.mkdir()
    cache.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.INFO):
        assert load([nvme]) is None
    assert "the file of measured I/O settings is not used" in caplog.text
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    store([nvme], _MEASURED)
    assert load([nvme]) == _MEASURED


def test_a_file_larger_than_memory_is_not_read(nvme: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()
    os.truncate(cache, 1 << 40)
    assert load([nvme]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("request_bytes", value) for value in (1e6, "1MiB")),
        *(("backend", value) for value in ("threadz", ["threads"])),
        *(("setting", value) for value in ([], {"backend": "threads"})),
        *(("num_threads", True), ("cpu_cores", "many"), ("measured_at", None)),
        *(("read_bytes_per_second", 0), ("mixed_bytes_per_second", float("nan"))),
    ],
)
def test_an_entry_that_is_damaged_is_not_used(nvme: Path, cache: Path, name: str, value: Any) -> None:
    store([nvme], _MEASURED)
    _written(cache, cpu_cores=0.5)
    assert load([nvme]) == replace(_MEASURED, cpu_cores=0.5)
    _written(cache, **{name: value})
    assert measured_bandwidth([nvme]) is None


def test_a_file_that_cannot_be_written_costs_a_line(
    tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "blocker"
    blocker.touch()
    monkeypatch.setenv("INFINITY_CACHE_DIR", str(blocker / "below"))
    with caplog.at_level(logging.INFO):
        store([nvme], _MEASURED)
    assert "cannot be stored for the next run" in caplog.text
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


def _on_device(status: os.stat_result, number: int) -> os.stat_result:
    return os.stat_result((*status[:2], number, *status[3:]))


def test_a_result_holds_for_one_machine_kernel_and_set_of_drives(
    tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load([nvme]) is None
    store([nvme], _MEASURED)
    other = tmp_path / "other"
    other.mkdir()
    assert load([other]) is load([nvme, other]) is load([tmp_path / "missing"]) is None
    (tmp_path / "link").symlink_to(nvme)
    assert load([tmp_path / "link"]) == _MEASURED
    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", lambda: "9.9")
        assert load([nvme]) is None
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_MACHINE_ID", tmp_path / "none")
        patch.setattr(platform, "node", lambda: "elsewhere")
        assert load([nvme]) is None
    with monkeypatch.context() as patch:
        real = os.stat
        patch.setattr(cache_module.os, "stat", lambda path, **o: _on_device(real(path, **o), 77))
        assert load([nvme]) is None, "another drive was mounted there"
    assert load([nvme]) == _MEASURED
    assert _MEASURED.bandwidth.date == "2026-01-02"


def test_the_last_measurement_counts_and_others_stay(tmp_path: Path, nvme: Path) -> None:
    store([nvme], _MEASURED)
    store([tmp_path], _MEASURED)
    newer = replace(_BANDWIDTH, mixed_bytes_per_second=9e9)
    store([nvme], replace(_MEASURED, bandwidth=newer))
    assert measured_bandwidth([nvme]) == newer
    assert load([tmp_path]) == _MEASURED
