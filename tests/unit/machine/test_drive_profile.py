"""What `infinity profile` measures, and which settings follow; the drive is played here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.machine.drive_profile import (
    QUICK,
    DriveProfile,
    candidates,
    default_setting,
    settings_for,
    sweep,
)
from swapper.errors import BackendUnavailableError
from swapper.measure.measurement import IOSetting, Workload
from swapper.volumes.directory import Directory
from tests.unit.fake_drive import FakeDrive

_MIB = 1 << 20
_URING, _THREADS = IOSetting("uring", 4 * _MIB, 4, 8), IOSetting("threads", 2 * _MIB, 8, 8)


def measured(path: Path, drive: FakeDrive) -> DriveProfile:
    found = DriveProfile([Directory(path)], is_direct=True)
    sweep(drive, found, QUICK, settings_for(found.directories))  # type: ignore[arg-type]
    return found


def test_every_setting_is_measured_the_best_again_and_the_best_one_alone(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive(speed=lambda setting: 2e9 if setting == _URING else 1e9))
    assert found.unusable == {}
    assert list(found.samples) == settings_for(found.directories) and default_setting() in found.samples
    counts = [len(found.rates(setting)) for setting in found.samples]
    assert sorted(counts)[-4:] == [QUICK.num_rounds] * 4 and set(counts) == {1, QUICK.num_rounds}
    assert {each.setting for each in found.alone.values()} == {_URING}
    assert set(found.alone) == {Workload.READ, Workload.WRITE}


def test_a_backend_that_is_missing_is_told_with_its_reason(tmp_path: Path) -> None:
    found = measured(tmp_path, FakeDrive(errors={"uring": _unavailable("uring")}))
    assert "no uring" in found.unusable["uring"]
    assert {setting.backend for setting in found.samples} == {"threads"}


def _unavailable(name: str) -> BackendUnavailableError:
    return BackendUnavailableError(name, f"no {name}", "take another")


@pytest.mark.parametrize("backend", ["threads", "uring", "aiofiles"])
@pytest.mark.parametrize("num_drives", [1, 2])
def test_settings_that_are_measured_can_be_put_into_a_config(backend: str, num_drives: int) -> None:
    found = DriveProfile([])
    for setting in candidates([backend], num_drives):  # type: ignore[list-item]
        block = found.block(setting) | {"train_micro_batch_size_per_gpu": 1}
        io = load_config(block, check_storage=False).io
        assert IOSetting(io.backend, io.request_bytes, io.num_threads, io.max_inflight) == setting


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
    assert DriveProfile([Directory(tmp_path)]).advice() is None
