"""How fast drives are is found out once, briefly, and only where it matters."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import swapper.volumes.drive_speed as module
import swapper.volumes.volume as volume_module
from swapper import Directory, Drive, Volume, VolumeError, describe_drive
from swapper.volumes.drive_speed import measure_speed
from swapper.volumes.scratch_file import ScratchFile

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", {})


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "abc"]
    for path in found:
        path.mkdir()
    return found


def _drives(monkeypatch: pytest.MonkeyPatch, devices: dict[Path, str]) -> None:
    def describe(path: Path) -> Drive:
        return dataclasses.replace(describe_drive(path), device=devices[path], device_number=hash(devices[path]))

    monkeypatch.setattr(volume_module, "describe_drive", describe)


class _Speeds:
    """Stands for the measurement, and counts it."""

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds = speeds
        self.measured: list[str] = []

    def __call__(self, file: ScratchFile) -> float:
        assert file.is_direct
        assert file.num_bytes >= 16 * _MIB
        self.measured.append(file.directory.name)
        return self.speeds[file.directory.name]


def _shares(volume: Volume) -> list[float]:
    return [file.num_bytes / volume.capacity_bytes for file in volume.files]


def _open(directories: list[Path | Directory]) -> Volume:
    return Volume(directories, 96 * _MIB)


def test_work_is_shared_out_by_measured_speed(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {path: path.name for path in paths})
    speeds = _Speeds({"a": 3e9, "b": 1e9, "c": 2e9})
    monkeypatch.setattr(module, "measure_speed", speeds)
    with contextlib.closing(_open(list(paths))) as volume:
        assert _shares(volume) == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=0.02)
    with contextlib.closing(_open(list(paths[:2]))) as volume:
        assert _shares(volume) == pytest.approx([3 / 4, 1 / 4], abs=0.02)
    assert speeds.measured == ["a", "b", "c"], "once per process and directory"


def test_directories_on_one_drive_share_its_speed(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {paths[0]: "one", paths[1]: "other", paths[2]: "one"})
    speeds = _Speeds({"a": 2e9, "b": 2e9})
    monkeypatch.setattr(module, "measure_speed", speeds)
    with contextlib.closing(_open(list(paths))) as volume:
        assert _shares(volume) == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=0.02)
    assert speeds.measured == ["a", "b"]


def test_what_is_given_is_not_measured(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _drives(monkeypatch, {path: path.name for path in paths})
    speeds = _Speeds({"a": 2e9})
    monkeypatch.setattr(module, "measure_speed", speeds)
    with contextlib.closing(_open([paths[0], Directory(paths[1], bytes_per_second=1e9)])) as volume:
        assert _shares(volume) == pytest.approx([2 / 3, 1 / 3], abs=0.02)
    assert speeds.measured == ["a"]


@pytest.mark.parametrize("why", ["one drive", "page cache", "small"])
def test_where_nothing_can_be_learned_nothing_is_measured(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    _drives(monkeypatch, {path: "one" if why == "one drive" else path.name for path in paths})
    monkeypatch.setattr(module, "measure_speed", lambda file: pytest.fail("measured"))
    num_bytes = 60 * _MIB if why == "small" else 96 * _MIB
    with contextlib.closing(Volume(list(paths), num_bytes, direct=why != "page cache")) as volume:
        assert _shares(volume) == pytest.approx([1 / 3] * 3, abs=0.02)


def _file(directory: Path, num_bytes: int = 32 * _MIB) -> ScratchFile:
    file = ScratchFile(describe_drive(directory))
    file.reserve(num_bytes)
    file.bypass_page_cache(True)
    return file


def _transfers(monkeypatch: pytest.MonkeyPatch, read_seconds: float, write_seconds: float) -> list[int]:
    """Have transfers of the measurement take so long by a clock of their own, one after the other; return their sizes."""
    sizes: list[int] = []
    lock = threading.Lock()
    now = 0.0

    def transfer(seconds: float):
        def pass_time(fd: int, memory: tuple[memoryview], offset: int) -> int:
            nonlocal now
            with lock:
                now += seconds
                sizes.append(len(memory[0]))
            return len(memory[0])

        return pass_time

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(os, "preadv", transfer(read_seconds))
    monkeypatch.setattr(os, "pwritev", transfer(write_seconds))
    return sizes


def test_the_speed_is_that_of_reading_and_writing_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(_file(tmp_path)) as file:
        sizes = _transfers(monkeypatch, 0.004, 0.012)
        speed = measure_speed(file)
        monkeypatch.undo()
    ideal = sizes[0] / 0.008
    assert speed == pytest.approx(ideal, rel=0.01)


def test_a_measurement_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the drive is, in bytes; however slow, in requests."""
    with contextlib.closing(_file(tmp_path)) as file:
        sizes = _transfers(monkeypatch, 1e-6, 1e-6)
        measure_speed(file)
        assert sum(sizes) <= 2 * (256 + 4) * _MIB
        sizes = _transfers(monkeypatch, 0.05, 0.05)
        measure_speed(file)
        assert len(sizes) <= 2 * (4 + 4)
        monkeypatch.undo()


def test_only_the_own_space_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    real = {"preadv": os.preadv, "pwritev": os.pwritev}

    def noting(name: str):
        def transfer(fd: int, memory: tuple[memoryview], offset: int) -> int:
            ends.append(offset + len(memory[0]))
            return real[name](fd, memory, offset)

        return transfer

    with contextlib.closing(_file(tmp_path, 3 * _MIB + 4096)) as file:
        for name in real:
            monkeypatch.setattr(os, name, noting(name))
        assert measure_speed(file) > 0
        monkeypatch.undo()
        assert max(ends) <= os.fstat(file.fd).st_size == 3 * _MIB + 4096


def test_an_error_of_the_drive_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with contextlib.closing(_file(tmp_path)) as file:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(VolumeError, match=r"reading from the scratch file in '.*' on .* failed: .*EIO.*kernel log"):
            measure_speed(file)


def test_a_drive_that_does_not_answer_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def hanging(*_: object) -> int:
        may_go.wait(20.0)
        return 0

    with contextlib.closing(_file(tmp_path)) as file:
        monkeypatch.setattr(os, "pwritev", hanging)
        monkeypatch.setattr(module, "_HANG_SECONDS", 0.3)
        before = set(threading.enumerate())
        with pytest.raises(VolumeError, match=r"writing to the scratch file in .* failed: did not answer for 0\.3 sec"):
            measure_speed(file)
        may_go.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(20.0)
