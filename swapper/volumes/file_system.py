"""The file system and the drive of a directory."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from swapper.errors import VolumeError, as_volume_error

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NETWORK_NAMES = (
    "9p acfs afpfs afs beegfs ceph cifs coda davfs glusterfs gpfs lustre ncpfs nfs nfs4 orangefs panfs pvfs2 smb2 smb3 "
    "smbfs vboxsf virtiofs vmhgfs webdav wekafs"
)
_NETWORK_KINDS = frozenset(_NETWORK_NAMES.split())
_BLOCK_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Drive:
    """The storage of a directory.

    Attributes:
        path: The directory, as it was given.
        file_system: Kind of file system as the kernel calls it, such as ``"ext4"``, or ``"unknown"``.
        device: Name of the whole block device, such as ``"nvme0n1"``, the same for all its partitions; ``None`` if
            there is none (memory, network, overlay).
        device_number: Directories with the same number lie in one file system and share its free space.
        is_tmpfs: The bytes lie in RAM (or swap).
        is_network: Another machine or another process (FUSE) serves the bytes.
        free_bytes: What this user may still write.
        total_bytes: Size of the file system; 0 if it has no limit.
    """

    path: Path
    file_system: str
    device: str | None
    device_number: int
    is_tmpfs: bool
    is_network: bool
    free_bytes: int
    total_bytes: int

    @property
    def identity(self) -> str:
        """Equal for two directories exactly if they are on one drive, and so share its speed."""
        return self.device or f"device {os.major(self.device_number)}:{os.minor(self.device_number)}"

    def words(self) -> str:
        """Return how a message calls the drive: ``"nvme0n1 (ext4)"``, or only the kind of file system."""
        return f"{self.device} ({self.file_system})" if self.device else self.file_system


def describe_drive(path: str | os.PathLike[str]) -> Drive:
    """Return the storage of an existing path. Nothing is written, and no file is read from the drive.

    Raises:
        VolumeError: The path does not exist; this user may not go there; the drive does not answer properly.
    """
    path = Path(path)
    with as_volume_error(path, f"cannot look at {str(path)!r}"):
        try:
            status = os.stat(path)
            space = shutil.disk_usage(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            problem = f"directory {str(path)!r} does not exist; create it or correct the path"
            raise VolumeError(path, problem) from error
        except PermissionError as error:
            raise VolumeError.unwritable(path, error) from error
    kind, source = _mount_of(path)  # "ext4", "/dev/nvme0n1p2"
    number = _device_number(status.st_dev, source)
    return Drive(
        path=path,
        file_system=kind,
        device=_block_device(number),
        device_number=number,
        is_tmpfs=kind in _MEMORY_KINDS,
        is_network=kind in _NETWORK_KINDS or kind == "fuse" or kind.startswith("fuse."),
        free_bytes=space.free,
        total_bytes=space.total,
    )


def _mount_of(path: Path) -> tuple[str, str]:
    """Return the kind and the source of the mounted file system that holds a path: of the deepest one above it."""
    deepest, kind, source = -1, "unknown", ""
    with contextlib.suppress(OSError):  # without /proc (in a sandbox): "unknown"
        path = path.resolve()
        for mount in psutil.disk_partitions(all=True):
            point = Path(mount.mountpoint)
            # Of two mounts on the same point, the later one hides the earlier.
            if len(point.parts) >= deepest and (point == path or point in path.parents):
                deepest, kind, source = len(point.parts), mount.fstype, mount.device
    return kind, source


def _device_number(made_up: int, source: str) -> int:
    """Return ``st_dev`` or, if the file system made that up, the number of its drive."""
    # btrfs has an own st_dev for each subvolume, with major number 0: they would count as different drives.
    if not os.major(made_up) and source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            return os.stat(source).st_rdev
    return made_up


def _block_device(number: int) -> str | None:
    """Return the name of the whole drive with a device number, or the whole drive that a partition lies on."""
    entry = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"  # a link: 259:2 -> .../nvme0n1/nvme0n1p2
    try:
        return _whole_drive(entry.resolve(strict=True)).name
    except OSError:
        return None


def _whole_drive(entry: Path) -> Path:
    # A partition's parent is its disk. An encrypted or logical volume (dm-0) lists its drives in `slaves`; with
    # several, as in a RAID, it is its own identity.
    if (entry / "partition").exists():
        return entry.parent
    below = list((entry / "slaves").iterdir()) if (entry / "slaves").is_dir() else []
    return _whole_drive(below[0].resolve(strict=True)) if len(below) == 1 else entry
