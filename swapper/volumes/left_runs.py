"""Files that durable runs and killed saves have left in a directory: found, and removed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swapper.errors import VolumeError
from swapper.volumes.own_files import require_own_directory
from swapper.volumes.publish import abandoned, is_locked, remove_abandoned
from swapper.volumes.run_directory import MAGIC, PART_OF_COMMIT, RunDirectory, files_of_run

_LOCK = "lock"
_COMMIT = re.compile(r"commit-\d{10,}")
_STATES = re.compile(r"states-\d+-of-\d+")
# A run is in DIRECTORY/durable; with several processes, each has a directory of its own below that. You may also name a
# parent of DIRECTORY.
_DEPTH = 3


@dataclass(frozen=True)
class LeftRun:
    """A durable run's directory on one drive.

    Attributes:
        path: The directory.
        num_bytes: Space that its files take on the drive.
        num_commits: Number of commits that can be resumed from; 0 also for directories on a run's other drives.
        changed_at: When the newest of its files was written, in seconds since 1970.
        is_in_use: A process has its lock now.
    """

    path: Path
    num_bytes: int
    num_commits: int
    changed_at: float
    is_in_use: bool

    def remove(self) -> None:
        """Remove its files, and the directory if nothing else is in it.

        Raises:
            DurableRunError: A process has it. Nothing has been removed.
            OSError: Something cannot be removed.
        """
        with contextlib.closing(RunDirectory(self.path)):  # its lock keeps a process from resuming meanwhile
            # Commits first: if this is interrupted, no commit is left whose states are gone.
            for file in _files(self.path):
                file.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def left_runs(directory: Path) -> list[LeftRun]:
    """Return the runs in a directory and below it.

    Raises:
        OSError: It cannot be read.
    """
    found, own = [], list[Path]()
    for path in _folders(directory, _DEPTH):
        with contextlib.suppress(VolumeError, OSError):
            require_own_directory(path)
            own.append(path)
    for path in own:
        files = list(_files(path))
        states = [file.stat() for file in files]
        if files:
            found.append(
                LeftRun(
                    path=path,
                    num_bytes=sum(each.st_blocks * 512 for each in states),
                    num_commits=sum(_COMMIT.fullmatch(file.name) is not None for file in files),
                    changed_at=max(each.st_mtime for each in states),
                    is_in_use=is_locked(path / _LOCK),
                )
            )
    return found


def bytes_of_run(directory: Path) -> int:
    """Return the space that a run's states take in a directory: a resumed run needs no other space for them."""
    # st_blocks counts units of 512 bytes. lstat: the size of a link's target is not in this directory.
    return sum(file.lstat().st_blocks * 512 for file in directory.glob("states-*") if _STATES.fullmatch(file.name))


@dataclass(frozen=True)
class LeftSave:
    """A hidden directory of a killed save. `remove_abandoned` of its parent directory removes it.

    Attributes:
        path: The hidden directory.
        num_bytes: Space that its files take on the drive.
    """

    path: Path
    num_bytes: int


def left_saves(directory: Path) -> list[LeftSave]:
    """Return the killed saves in a directory and below it.

    Raises:
        OSError: It cannot be read.
    """
    found = [path for folder in _folders(directory, _DEPTH) for path in abandoned(folder)]
    return [LeftSave(path, _bytes_below(path)) for path in found]


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process is removing it
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def _files(path: Path) -> Iterator[Path]:
    """Yield a run's files, commits first and the lock last; none if the directory is not a run's."""
    claimed = files_of_run(path)
    if claimed is None:
        return
    # Only files that the run has marked or claimed: another program's file may have such a name.
    found = [file for file in sorted(path.iterdir()) if file.is_file() and not file.is_symlink()]
    yield from (file for file in found if PART_OF_COMMIT.fullmatch(file.name) or _is_commit(file))
    yield from (file for file in found if file.name in claimed and _STATES.fullmatch(file.name))
    yield path / _LOCK


def _is_commit(file: Path) -> bool:
    if _COMMIT.fullmatch(file.name) is None or not os.access(file, os.R_OK):
        return False
    with file.open("rb") as commit:
        return commit.read(len(MAGIC)) == MAGIC


def _folders(directory: Path, depth: int) -> Iterator[Path]:
    yield directory
    with os.scandir(directory) as entries:
        below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False)) if depth else []
    for path in below:
        if os.access(path, os.R_OK | os.X_OK):
            yield from _folders(Path(path), depth - 1)


__all__ = ["LeftRun", "LeftSave", "bytes_of_run", "left_runs", "left_saves", "remove_abandoned"]
