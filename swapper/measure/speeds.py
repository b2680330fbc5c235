"""Speeds of the drives of a striped volume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from swapper.errors import LimitError, SwapperError, VolumeError, VolumeTooSmallError
from swapper.measure.measurement import DriveTest, IOSetting, Workload
from swapper.volumes.directory import Directory, DirectoryLike, as_directories
from swapper.volumes.file_system import describe_drive

_LEAST_BYTES = 64 << 20  # of a volume: on a smaller one the measurement would take longer than what it saves
_FILE_BYTES = 32 << 20  # on each drive
_SETTING = IOSetting("threads", 1 << 20, num_threads=4, max_inflight=4)
_SECONDS = 0.12  # for filling, and again for measuring, of each drive: only ratios matter, to about a tenth
_DEADLINE_SECONDS = 30.0  # of a transfer; a drive that hangs makes with_speeds() raise, since the volume would use it

_known: dict[tuple[str, str], float] = {}  # by drive and directory, for the life of the process


def with_speeds(
    directories: Sequence[DirectoryLike] | DirectoryLike, capacity_bytes: int, *, direct: bool = True
) -> list[Directory]:
    """Return the directories with the speeds of their drives.

    Speeds that are not given are measured, one drive after the other. They stay unknown if all directories are on one
    drive, the volume is small, or transfers go through the page cache. Directories on one drive share its speed.

    Args:
        directories: As the user named them.
        capacity_bytes: Size of the volume.
        direct: Whether transfers are to bypass the page cache.

    Raises:
        VolumeError: A directory cannot be used, or a drive fails.
    """
    wanted = as_directories(directories)
    if len(wanted) == 1 or capacity_bytes < _LEAST_BYTES or not direct:
        return wanted
    drives = [describe_drive(directory.path).identity for directory in wanted]
    sharing = Counter(drives)
    measured: dict[str, float | None] = {}
    found = []
    for directory, drive in zip(wanted, drives, strict=True):
        if directory.bytes_per_second is None and len(sharing) > 1:
            if drive not in measured:
                measured[drive] = _measured(directory, drive)
            speed = measured[drive]
            directory = replace(directory, bytes_per_second=None if speed is None else speed / sharing[drive])
        found.append(directory)
    return found


def _measured(directory: Directory, drive: str) -> float | None:
    """Return the bytes per second of an optimizer step's mix there, or ``None`` if it cannot be measured."""
    key = (drive, str(directory.path.resolve()))
    if key in _known:
        return _known[key]
    try:
        rate = glance([directory], _SECONDS)
    except VolumeTooSmallError:  # no room for the measurement; the volume itself may still fit
        return None
    except (VolumeError, LimitError):
        raise
    except SwapperError as error:
        raise VolumeError(directory.path, f"its speed cannot be measured: {error}") from error
    if rate is not None:
        _known[key] = rate
    return rate


def glance(directories: Sequence[Directory], seconds: float) -> float | None:
    """Measure an optimizer step's mix of reads and writes quickly.

    Returns bytes per second, or ``None`` without direct I/O.

    It fills a file of up to 32 MiB on each drive, for ``seconds`` at most, and measures for as long.

    Raises:
        SwapperError: There is no room, or a drive fails.
    """
    with DriveTest(directories, _FILE_BYTES, deadline_seconds=_DEADLINE_SECONDS) as test:
        if not test.is_direct:
            return None
        test.prepare(max_seconds=seconds)
        return test.measure(_SETTING, Workload.MIXED, seconds).bytes_per_second
