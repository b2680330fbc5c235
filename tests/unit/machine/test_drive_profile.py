"""What `infinity profile` measures, and which settings follow; the drive is played here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.machine.autotune import keep, tune_io
from infinity.machine.bandwidth_cache import measured_bandwidth
from infinity.machine.drive_profile import (
    QUICK,
    WORKLOADS,
    DriveProfile,
    candidates,
    default_setting,
    directories_of,
    io_of,
    reproduces,
    settings_for,
    sweep,
)
from swapper.errors import ArgumentError, WrongDataError
from swapper.measure.io_setting import IOSetting
from tests.unit.machine.fake_drive import FakeDrive

_MIB = 1 << 20
_URING, _THREADS = IOSetting("uring", 4 * _MIB, 4, 8), IOSetting("threads", 2 * _MIB, 8, 8)


def measured(path: Path, drive: FakeDrive) -> DriveProfile:
    found = DriveProfile(directories_of([path]), is_direct=True)
    sweep(drive, found, QUICK, settings_for(found, QUICK))  # type: ignore[arg-type]
    return found


def test_every_setting_is_measured_in_every_way(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive())
    assert found.verified == ["threads", "uring"] and found.unusable == {}
    assert default_setting() in found.settings
    assert {len(found.rates(setting, each)) for setting in found.settings for each in WORKLOADS} == {QUICK.num_rounds}


def test_a_backend_that_is_missing_is_told_with_its_reason(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive(errors={"uring": ArgumentError("the kernel forbids io_uring")}))
    assert found.unusable == {"uring": "the kernel forbids io_uring"}
    assert {setting.backend for setting in found.settings} == {"threads"}


def test_other_bytes_than_were_written_end_it(tmp_path: Path) -> None:
    error = WrongDataError.__new__(WrongDataError)
    Exception.__init__(error, "byte 4096 of the scratch file")
    with pytest.raises(WrongDataError, match="4096"):
        measured(tmp_path, FakeDrive(errors={"verify uring": error}))


@pytest.mark.parametrize("backend", ["threads", "uring", "aiofiles"])
@pytest.mark.parametrize("num_drives", [1, 2])
def test_settings_that_are_measured_can_be_put_into_a_config(backend: str, num_drives: int) -> None:
    found = DriveProfile([])
    for setting in candidates(io_of({}), [backend], 64 * _MIB * num_drives, num_drives):  # type: ignore[list-item]
        assert reproduces(found.block(setting), setting), setting


def test_the_advice_is_a_config_that_works_like_what_was_fastest(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive(speed=lambda setting: 2e9 if setting == _URING else 1e9))
    advice = found.advice()
    assert advice is not None and advice.setting == _URING
    assert advice.bandwidth.mixed_bytes_per_second == 2e9
    block = json.loads(json.dumps(found.block(advice.setting)))
    io = load_config(block | {"train_micro_batch_size_per_gpu": 1}, check_storage=False).io
    assert (io.backend, io.request_bytes, io.num_threads, io.max_inflight) == ("uring", 4 * _MIB, 4, 8)
    assert io.direct


def test_half_a_measurement_gives_no_advice(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive())
    found.stopped_by = "interrupted"
    assert found.advice() is None
    assert DriveProfile(directories_of([tmp_path])).advice() is None


def test_plans_and_autotune_take_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_CACHE_DIR", str(tmp_path / "cache"))
    found = measured(tmp_path, FakeDrive(speed=lambda setting: 2e9 if setting == _THREADS else 1e9))
    advice = found.advice()
    assert advice is not None
    keep(advice, found.directories, io_of({}))
    known = measured_bandwidth([tmp_path])
    assert known == advice.bandwidth
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = load_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"stage": 3, "offload_optimizer": offload},
            "infinity": {"autotune_io": "auto"},
        }
    )
    tuned = tune_io(config).io
    assert (tuned.backend, tuned.request_bytes, tuned.num_threads) == ("threads", 2 * _MIB, 8)
