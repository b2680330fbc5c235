"""The directories that are to be measured: what lies under them, and whether a test file fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from swapper.config import ALIGNMENT
from swapper.errors import SwapperError
from swapper.volumes.file_system import Drive, describe_drive

from .grid import size_words

_MIB = 1 << 20
_MARGIN = 0.95  # of the free space: a drive must not be filled to the last block
_MEMORY_MARGIN = 0.5


class PlaceRefused(ValueError):
    """A directory cannot be measured; the message says why and what to do."""


@dataclass(frozen=True)
class Places:
    """The directories, what lies under each, and what there is to say about them."""

    paths: tuple[Path, ...]
    drives: tuple[Drive, ...]
    remarks: tuple[str, ...] = field(default=())

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
        return "; ".join(
            f"{path}: {drive.words()}, {drive.free_bytes / 1e9:,.1f} GB free"
            for path, drive in zip(self.paths, self.drives, strict=True)
        )


def look_at(paths: Sequence[Path], file_bytes: int, least_bytes: int) -> Places:
    """Look at all directories before anything is written.

    Args:
        paths: as given by the user.
        file_bytes: size of the test file in each.
        least_bytes: the smallest size that could be measured instead.

    Raises:
        PlaceRefused: the first one that cannot be measured, and the cure.
    """
    _refuse_duplicates(paths)
    drives = [_look(path) for path in paths]
    for path, drive in zip(paths, drives, strict=True):
        sharing = sum(other.device_number == drive.device_number for other in drives)
        _check_room(path, drive, file_bytes, least_bytes, sharing)
    return Places(tuple(paths), tuple(drives), tuple(_remarks(paths, drives)))


def _refuse_duplicates(paths: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        other = seen.get(path.resolve())
        seen[path.resolve()] = path
        if other is not None:
            same = f"{path} is given twice" if str(path) == str(other) else f"{other} and {path} are the same directory"
            raise PlaceRefused(f"{same}: name each drive once")


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
        reason = "its file system is mounted read-only" if _is_read_only(path) else "this user may not write there"
        raise PlaceRefused(f"{path} is not writable: {reason}; name a directory that is")
    return drive


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _check_room(path: Path, drive: Drive, file_bytes: int, least_bytes: int, sharing: int) -> None:
    free_bytes, where = drive.free_bytes, "free"
    usable = free_bytes * _MARGIN
    if drive.is_tmpfs:
        available = psutil.virtual_memory().available
        if available * _MEMORY_MARGIN < usable:
            free_bytes, where, usable = available, "of memory available for files in RAM", available * _MEMORY_MARGIN
    if file_bytes * sharing <= usable or not drive.total_bytes:  # no total: the file system knows no limit
        return
    largest = int(usable / sharing) // _MIB * _MIB
    each = f" for each of the {sharing} directories on it" if sharing > 1 else ""
    problem = f"{path}: the test needs {size_words(file_bytes)}{each}, and {size_words(free_bytes)} are {where}"
    if largest < least_bytes:
        cure = (
            f"at least {size_words(least_bytes)} are needed (less with --quick, or smaller --request-sizes or --in-flight); "
            "make room or name another directory"
        )
    else:
        cure = f"--size {largest // _MIB}MiB works"
    raise PlaceRefused(f"{problem}: {cure}")


def _remarks(paths: Sequence[Path], drives: Sequence[Drive]) -> list[str]:
    remarks = []
    for path, drive in zip(paths, drives, strict=True):
        if drive.is_tmpfs:
            remarks.append(f"{path} is {drive.file_system}: its files lie in RAM, so this measures memory, not a drive")
        if drive.is_network:
            remarks.append(
                f"{path} is a network file system ({drive.file_system}): the portable backend aiofiles is measured; "
                "--backends threads,aiofiles tries others"
            )
    by_drive: dict[str, list[Path]] = {}
    for path, drive in zip(paths, drives, strict=True):
        by_drive.setdefault(drive.identity, []).append(path)
    for identity, sharing in by_drive.items():
        if len(sharing) > 1:
            names = ", ".join(map(str, sharing))
            remarks.append(f"{names} lie on one drive ({identity}): striping over them adds no bandwidth")
    return remarks


def round_to_alignment(num_bytes: int) -> int:
    """The next multiple of what direct I/O needs."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
