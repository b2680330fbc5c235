"""How fast drives are is found out once, briefly, and only where it matters."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import swapper.measure.speeds as module
import swapper.volumes.volume as volume_module
from swapper import Directory, Drive, Swapper, SwapperConfig, VolumeError, describe_drive
from swapper.backends.volume_backend import VolumeBackend
from swapper.measure.measurement import DriveTest, Sample, Workload
from swapper.measure.speeds import with_speeds
from swapper.volumes.directory import DirectoryLike
from tests.unit.fake_drive import FakeDrive

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", {})


def _drives(monkeypatch: pytest.MonkeyPatch, devices: dict[Path, str]) -> None:
    def describe(path: Path) -> Drive:
        return dataclasses.replace(describe_drive(path), device=devices[path], device_number=hash(devices[path]))

    for each in (volume_module, module):
        monkeypatch.setattr(each, "describe_drive", describe)


def _measured(monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float]) -> Callable[[], list[str]]:
    """Directories are as fast as ``speeds`` says; returns a function that tells which were measured."""
    drive = FakeDrive(lambda setting: speeds[opened()[-1]])

    def opened() -> list[str]:
        assert all(workload is Workload.MIXED for _, workload in drive.measured)
        return [directories[0].path.name for directories, *_ in drive.opened]

    monkeypatch.setattr(module, "DriveTest", drive)
    return opened


def _shares(directories: Sequence[DirectoryLike], num_bytes: int = 96 * _MIB, direct: bool = True) -> list[float]:
    """What each directory gets of a swapper's bytes."""
    with Swapper.open(directories, num_bytes, SwapperConfig(backend="threads", direct=direct)) as swapper:
        assert isinstance(swapper.backend, VolumeBackend)
        volume = swapper.backend.volume
        return [file.num_bytes / volume.capacity_bytes for file in volume.files]


def test_work_is_shared_out_by_measured_speed(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {path: path.name for path in paths})
    measured = _measured(monkeypatch, {"a": 3e9, "b": 1e9, "c": 2e9})
    assert _shares(paths) == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=0.02)
    assert _shares(paths[:2]) == pytest.approx([3 / 4, 1 / 4], abs=0.02)
    assert measured() == ["a", "b", "c"], "once per process and directory"


def test_directories_on_one_drive_share_its_speed(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {paths[0]: "one", paths[1]: "other", paths[2]: "one"})
    measured = _measured(monkeypatch, {"a": 2e9, "b": 2e9})
    assert _shares(paths) == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=0.02)
    assert measured() == ["a", "b"]


def test_what_is_given_is_not_measured(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {path: path.name for path in paths})
    measured = _measured(monkeypatch, {"a": 2e9})
    assert _shares([paths[0], Directory(paths[1], bytes_per_second=1e9)]) == pytest.approx([2 / 3, 1 / 3], abs=0.02)
    assert measured() == ["a"]


@pytest.mark.parametrize("why", ["one drive", "page cache", "small"])
def test_where_nothing_can_be_learned_nothing_is_measured(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    _drives(monkeypatch, {path: "one" if why == "one drive" else path.name for path in paths})
    monkeypatch.setattr(module, "DriveTest", lambda *_, **__: pytest.fail("measured"))
    num_bytes = 60 * _MIB if why == "small" else 96 * _MIB
    assert _shares(paths, num_bytes, why != "page cache") == pytest.approx([1 / 3] * 3, abs=0.02)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_speed_is_what_a_drive_test_measures(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The bytes of both directions per second, in the mix of an optimizer step, in the directory itself."""
    found: list[Sample] = []
    real = DriveTest.measure

    def measure(*arguments: Any) -> Sample:
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(DriveTest, "measure", measure)
    _drives(monkeypatch, {path: path.name for path in paths})
    if not is_full:
        monkeypatch.setattr(module, "_FILE_BYTES", 1 << 62)
    speeds = [each.bytes_per_second for each in with_speeds(paths[:2], 96 * _MIB)]
    assert speeds == ([None, None] if is_full is False else [sample.bytes_per_second for sample in found])
    assert {sample.workload for sample in found} <= {Workload.MIXED}
    assert os.listdir(paths[0]) == []


def test_an_error_of_the_drive_ends_it(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) > 1 << 16:  # opening a file tries it with less
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    _drives(monkeypatch, {path: path.name for path in paths})
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(VolumeError, match=r"its speed cannot be measured: .*EIO") as caught:
        with_speeds(paths[:2], 96 * _MIB)
    assert caught.value.directory == paths[0]
