"""Scratch files: reserved, nameless, and refused in words."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import swapper.volumes.scratch_file as scratch_module
import swapper.volumes.volume as volume_module
from swapper import ALIGNMENT, ArgumentError, Directory, Volume, VolumeError, VolumeTooSmallError
from swapper.volumes import file_system


def _raising(code: int) -> Callable[..., int]:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


def test_space_is_reserved_and_the_file_has_no_name(tmp_path: Path) -> None:
    volume = Volume([tmp_path], 1 << 20)
    status = os.fstat(volume.files[0].fd)
    assert volume.capacity_bytes == status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20, "nothing was reserved"
    assert status.st_nlink == 0
    assert os.listdir(tmp_path) == []
    volume.close()
    volume.close()
    assert volume.files[0].fd == -1


def test_a_file_is_unlinked_where_it_cannot_be_made_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refusing_open(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing_open)
    volume = Volume([tmp_path], ALIGNMENT)
    assert os.fstat(volume.files[0].fd).st_nlink == 0
    assert os.listdir(tmp_path) == []
    volume.close()


def test_page_cache_where_direct_transfers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(volume_module.os, "pwritev", _raising(errno.EINVAL))
    with caplog.at_level(logging.WARNING):
        volume = Volume([tmp_path], ALIGNMENT)
    monkeypatch.undo()
    assert not volume.is_direct
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "goes through the page cache: the file system refuses direct transfers of 4096 bytes" in caplog.text
    assert "page cache: the file system refuses" in volume.describe()
    volume.close()


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(VolumeError, match="missing' does not exist; create it") as missing:
        Volume([tmp_path / "missing"], ALIGNMENT)
    assert missing.value.directory == tmp_path / "missing"
    with pytest.raises(VolumeError, match="file' is not a directory"):
        Volume([file], ALIGNMENT)
    with pytest.raises(VolumeError):
        Volume([file / "below"], ALIGNMENT)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_directory_without_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(volume_module.os, "open", _raising(code))
    with pytest.raises(VolumeError, match=f"{os.strerror(code)} .errno {code}.*write access") as error:
        Volume([tmp_path], ALIGNMENT)
    assert isinstance(error.value.__cause__, OSError)


def test_a_limit_on_the_size_of_a_file_is_no_want_of_room(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(VolumeError, match=r"EFBIG.*ulimit -f") as error:
            Volume([tmp_path], 8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free" not in str(error.value) and os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_reservation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(scratch_module, "fallocate", _raising(code))
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(VolumeTooSmallError, match="8192 bytes are needed") as error:
        Volume([tmp_path], 2 * ALIGNMENT)
    assert os.strerror(code) in str(error.value)
    assert len(os.listdir("/proc/self/fd")) == files
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_given_twice_in_whatever_way(tmp_path: Path) -> None:
    (directory := tmp_path / "a").mkdir()
    (link := tmp_path / "link").symlink_to(directory)
    files = len(os.listdir("/proc/self/fd"))
    for twin in (directory, directory / ".." / "a", link, str(directory) + "/", Directory(link, bytes_per_second=1.0)):
        with pytest.raises(
            ArgumentError, match=r"a directory is given twice, as '.*a' and as '.*; name each drive once"
        ):
            Volume([directory, twin], ALIGNMENT)
    assert len(os.listdir("/proc/self/fd")) == files
    with contextlib.closing(Volume([link], ALIGNMENT)) as volume:
        assert volume.files[0].drive.device_number == os.stat(directory).st_dev


def test_a_drive_that_fails_at_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", _raising(errno.EIO))
    with pytest.raises(VolumeError, match=r"the scratch file in '.*' on .* cannot be used: .*EIO.*; choose another"):
        Volume([tmp_path], ALIGNMENT)


def _without_fallocate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each write, on a file system that cannot reserve space."""
    lengths: list[int] = []
    real = os.pwrite

    def counting(fd: int, data: memoryview, offset: int) -> int:
        lengths.append(len(data))
        return real(fd, data, offset)

    monkeypatch.setattr(scratch_module, "fallocate", _raising(errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "pwrite", counting)
    return lengths


def test_where_nothing_can_be_reserved_it_is_written_in_long_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = _without_fallocate(monkeypatch)
    with contextlib.closing(Volume([tmp_path], (20 << 20) + ALIGNMENT)) as volume:
        status = os.fstat(volume.files[0].fd)
        assert status.st_size == (20 << 20) + ALIGNMENT and status.st_blocks * 512 >= status.st_size
    assert lengths == [8 << 20, 8 << 20, 4 << 20 | ALIGNMENT]


def test_a_full_drive_is_an_error_at_the_start_where_space_has_to_be_written(
    small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_fallocate(monkeypatch)
    directory = small_tmpfs(8 << 20)
    status = os.statvfs(directory)
    found = SimpleNamespace(f_bavail=1 << 40, f_bfree=1 << 40, f_frsize=1, f_blocks=1 << 40)
    with monkeypatch.context() as patch, pytest.raises(VolumeTooSmallError, match="No space left on device"):
        patch.setattr(os, "statvfs", lambda path: found)
        Volume([directory], 12 << 20)
    assert os.statvfs(directory).f_bavail == status.f_bavail


@pytest.mark.root
def test_ram_is_said_to_be_no_drive(small_tmpfs, caplog: pytest.LogCaptureFixture) -> None:
    directory = small_tmpfs(1 << 20)
    with contextlib.closing(Volume([directory], ALIGNMENT)) as volume:
        assert not volume.is_network
    lines = [record.getMessage() for record in caplog.records if "RAM" in record.getMessage()]
    assert lines == [f"directory {str(directory)!r} is tmpfs: its files are in RAM, not on a drive"]


def test_a_network_file_system_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_system, "_mount_of", lambda path: ("nfs4", "server:/export"))
    with contextlib.closing(Volume([tmp_path], ALIGNMENT)) as volume:
        assert volume.is_network
    assert f"directory {str(tmp_path)!r} is a network file system (nfs4)" in caplog.text


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no directory given"):
        Volume([], ALIGNMENT)
    for volume_bytes in (1, 4095, 4097):
        with contextlib.closing(Volume([tmp_path], volume_bytes)) as volume:
            assert volume_bytes <= volume.capacity_bytes < volume_bytes + ALIGNMENT
    with pytest.raises(ArgumentError, match="capacity_bytes cannot be negative, got -1"):
        Volume([tmp_path], -1)
    with pytest.raises(ArgumentError, match="stripe_bytes must be a positive multiple of 4096, got 100"):
        Volume([tmp_path], 1, stripe_bytes=100)
