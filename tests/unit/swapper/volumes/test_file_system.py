"""What lies under a directory: the kind of file system, the drive, and whether it is a drive at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import swapper.volumes.file_system as module
from swapper import describe_drive


def _mounted(monkeypatch: pytest.MonkeyPatch, path: Path, kind: str, source: str = "none") -> None:
    mounts = [
        ("/dev/vda", "/", "ext4"),
        ("x", str(path), "xfs"),
        (source, str(path), kind),
        ("/dev/vdb", "/else", "xfs"),
    ]
    found = [SimpleNamespace(device=device, mountpoint=point, fstype=kind) for device, point, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: found)


def test_the_drive_under_a_directory(nvme_dir: Path) -> None:
    drive = describe_drive(nvme_dir)
    assert drive.path == nvme_dir
    assert drive.file_system != "unknown"
    assert drive.device
    assert (Path("/sys/block") / drive.device).exists(), "a partition instead of the whole drive"
    if os.major(os.stat(nvme_dir).st_dev):  # not made up
        assert drive.device_number == os.stat(nvme_dir).st_dev
    assert not drive.is_tmpfs
    assert not drive.is_network
    assert drive.words() == f"{drive.device} ({drive.file_system})"
    assert 0 < drive.free_bytes < drive.total_bytes
    assert drive.identity == drive.device


@pytest.mark.root
def test_tmpfs_is_no_drive(small_tmpfs) -> None:
    one, other = small_tmpfs(1 << 20), small_tmpfs(2 << 20)
    drive = describe_drive(one)
    assert (drive.file_system, drive.device, drive.is_tmpfs) == ("tmpfs", None, True)
    assert drive.words() == "tmpfs"
    assert drive.free_bytes == drive.total_bytes == 1 << 20
    assert drive.identity != describe_drive(other).identity


@pytest.mark.parametrize(
    ("kind", "is_network", "is_tmpfs"),
    [
        *((kind, True, False) for kind in ("nfs", "nfs4", "cifs", "smb3", "fuse", "fuse.sshfs", "9p", "ceph")),
        *((kind, False, False) for kind in ("fuseblk", "xfs", "btrfs", "overlay")),  # the first is a local NTFS drive
        ("ramfs", False, True),
    ],
)
def test_kinds_of_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_network: bool, is_tmpfs: bool
) -> None:
    _mounted(monkeypatch, tmp_path, kind)
    drive = describe_drive(tmp_path)
    assert (drive.file_system, drive.is_network, drive.is_tmpfs) == (kind, is_network, is_tmpfs)


def test_the_deepest_mount_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = tmp_path / "with blank"
    below = point / "a" / "b"
    below.mkdir(parents=True)
    _mounted(monkeypatch, point, "nfs4", "server:/export")
    assert describe_drive(below).file_system == "nfs4"
    assert describe_drive(tmp_path).file_system == "ext4"
    monkeypatch.setattr("psutil.disk_partitions", lambda all: os.stat(tmp_path / "no proc"))
    assert describe_drive(tmp_path).file_system == "unknown"


def test_a_made_up_device_number_is_looked_up_by_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "devices"
    drive = devices / "nvme9n1"
    partition = drive / "nvme9n1p2"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("2")
    status = os.stat("/dev/null")
    links = tmp_path / "by_number"
    links.mkdir()
    (links / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}").symlink_to(partition)
    monkeypatch.setattr(module, "_BLOCK_DEVICES", links)
    _mounted(monkeypatch, tmp_path, "btrfs", "/dev/null")
    real = os.stat
    for made_up in (os.makedev(0, 77), os.makedev(0, 78)):  # two subvolumes
        fake = SimpleNamespace(st_dev=made_up)
        monkeypatch.setattr(os, "stat", lambda path, fake=fake, **o: fake if path == tmp_path else real(path, **o))
        drive = describe_drive(tmp_path)
        assert (drive.device, drive.device_number) == ("nvme9n1", status.st_rdev)
        monkeypatch.setattr(os, "stat", real)
    assert module._device_number(os.makedev(0, 77), "tmpfs") == os.makedev(0, 77)
    assert module._block_device(os.makedev(0, 77)) is None


def test_an_encrypted_drive_is_the_drive_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sda", "sdb", "dm-0", "md0"):
        (tmp_path / name / "slaves").mkdir(parents=True)
    (tmp_path / "dm-0" / "slaves" / "sda").symlink_to(tmp_path / "sda")
    (tmp_path / "md0" / "slaves" / "sda").symlink_to(tmp_path / "sda")
    (tmp_path / "md0" / "slaves" / "sdb").symlink_to(tmp_path / "sdb")
    (tmp_path / "252:0").symlink_to(tmp_path / "dm-0")
    (tmp_path / "9:0").symlink_to(tmp_path / "md0")
    monkeypatch.setattr(module, "_BLOCK_DEVICES", tmp_path)
    assert module._block_device(os.makedev(252, 0)) == "sda"
    assert module._block_device(os.makedev(9, 0)) == "md0", "an array of several drives is one of its own"
