"""The directories that are to be measured: what lies under them, and whether a test file fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.io_profile.grid import MIB, size_words
from swapper.errors import SwapperError
from swapper.volumes.file_system import Drive, describe_drive

_MARGIN = 0.95  # of the free space: a drive must not be filled to the last block
_MEMORY_MARGIN = 0.5


class PlaceRefused(ValueError):
    """A directory cannot be measured; the message says why and what to do."""


@dataclass(frozen=True)
class Places:
    """The directories, and what lies under each."""

    drives: tuple[Drive, ...]

    @property
    def paths(self) -> list[Path]:
        """As given by the user."""
        return [drive.path for drive in self.drives]

    @property
    def is_network(self) -> bool:
        """Whether a network file system is among them."""
        return any(drive.is_network for drive in self.drives)

    @property
    def is_memory(self) -> bool:
        """Whether one of them lies in RAM."""
        return any(drive.is_tmpfs for drive in self.drives)

    @property
    def num_drives(self) -> int:
        """Different drives among them."""
        return len({drive.identity for drive in self.drives})

    def words(self) -> str:
        """`/mnt/a: nvme0n1 (ext4), 12 GB free`, for all of them."""
        return "; ".join(f"{each.path}: {each.words()}, {each.free_bytes / 1e9:,.1f} GB free" for each in self.drives)

    @property
    def remarks(self) -> list[str]:
        """What there is to say about them, in sentences."""
        remarks = []
        by_drive: dict[str, list[str]] = {}
        for drive in self.drives:
            by_drive.setdefault(drive.identity, []).append(str(drive.path))
            if drive.is_tmpfs:
                words = "its files lie in RAM, so this measures memory, not a drive"
                remarks.append(f"{drive.path} is {drive.file_system}: {words}")
            if drive.is_network:
                remarks.append(
                    f"{drive.path} is a network file system ({drive.file_system}): the portable backend aiofiles is "
                    "measured; --backends threads,aiofiles tries others"
                )
        for identity, names in by_drive.items():
            if len(names) > 1:
                words = f"lie on one drive ({identity}): striping over them adds no bandwidth"
                remarks.append(f"{', '.join(names)} {words}")
        return remarks


def look_at(paths: Sequence[Path], file_bytes: int, least_bytes: int) -> Places:
    """Look at all directories before anything is written.

    Args:
        paths: as given by the user.
        file_bytes: size of the test file in each.
        least_bytes: the smallest size that could be measured instead.

    Raises:
        PlaceRefused: the first one that cannot be measured, and the cure.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        other = seen.get(path.resolve())
        seen[path.resolve()] = path
        if other is not None:
            same = f"{path} is given twice" if str(path) == str(other) else f"{other} and {path} are the same directory"
            raise PlaceRefused(f"{same}: name each drive once")
    drives = tuple(map(_look, paths))
    for drive in drives:
        sharing = sum(other.device_number == drive.device_number for other in drives)
        _check_room(drive, file_bytes, least_bytes, sharing)
    return Places(drives)


def _look(path: Path) -> Drive:
    if not os.path.lexists(path):
        raise PlaceRefused(f"{path}: no such directory; create it (mkdir -p {path}) or name another one")
    if not path.is_dir():
        raise PlaceRefused(f"{path} is not a directory; name a directory on the drive that is to be measured")
    try:
        drive = describe_drive(path)
    except SwapperError as error:
        raise PlaceRefused(str(error)) from error
    if not os.access(path, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        reason = "its file system is mounted read-only" if is_read_only else "this user may not write there"
        raise PlaceRefused(f"{path} is not writable: {reason}; name a directory that is")
    return drive


def _check_room(drive: Drive, file_bytes: int, least_bytes: int, sharing: int) -> None:
    free_bytes, where = drive.free_bytes, "free"
    usable = free_bytes * _MARGIN
    if drive.is_tmpfs:
        available = psutil.virtual_memory().available
        if available * _MEMORY_MARGIN < usable:
            free_bytes, where, usable = available, "of memory available for files in RAM", available * _MEMORY_MARGIN
    if file_bytes * sharing <= usable or not drive.total_bytes:  # no total: the file system knows no limit
        return
    largest = int(usable / sharing) // MIB * MIB
    each = f" for each of the {sharing} directories on it" if sharing > 1 else ""
    cure = f"--size {largest // MIB}MiB works"
    if largest < least_bytes:
        cure = (
            f"at least {size_words(least_bytes)} are needed (less with --quick, or smaller --request-sizes or --in-flight); "
            "make room or name another directory"
        )
    needs = f"the test needs {size_words(file_bytes)}{each}, and {size_words(free_bytes)} are {where}"
    raise PlaceRefused(f"{drive.path}: {needs}: {cure}")
