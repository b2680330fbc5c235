"""The directory of a durable run: a lock, and one small file for each commit.

DIRECTORY/lock                  locked by the process that uses the run; one in each of its directories. Its first line
                                is the mark of a run, each further one the name of a file that the run made
DIRECTORY/commit-0000000007     appears when it is whole and on the drive
DIRECTORY/...                   the files that the lock names

A commit's file with two parts of 100 and 5 bytes, little-endian, 173 bytes in all:

     0  6 bytes   b"INFRUN"          16  32 bytes  maker, padded with zeros     64  100 bytes  part 0
     6  uint16    format             48  uint64    100                         164    5 bytes  part 1
     8  uint64    2 parts            56  uint64    5                           169  uint32     crc32c of bytes 0 to 168

And what runs and killed saves have left in directories: `left_runs` and `left_saves` find it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from swapper.errors import DurableRunError, VolumeError, as_unwritable, as_volume_error, error_words
from swapper.sync.lifetimes import LiveObjects
from swapper.uncopyable import Uncopyable, closed_unless_made
from swapper.volumes.own_files import UNTRUSTED, open_own, opened, require_own_directory
from swapper.volumes.publish import abandoned, is_locked, make_directory, replacing, sync_directory

logger = logging.getLogger(__name__)

FORMAT = 2
_MAGIC = b"INFRUN"  # the first bytes of a commit's file
_HEAD = struct.Struct("<6sHQ32s")  # magic, format, number of parts, maker
_PREFIX = "commit-"
_MARK = "infinity durable run"
_MOST_MARK_BYTES = 1 << 16  # of the lock that are read: room for thousands of names
# The name of a commit while it is written: `replacing` in swapper.volumes.publish makes it.
_PART_OF_COMMIT = re.compile(r"\.commit-\d{10,}\.[0-9a-f]{16}")
_COMMIT = re.compile(r"commit-\d{10,}")
_STATES = re.compile(r"states-\d+-of-\d+")
# A run is in DIRECTORY/durable; with several processes, each has a directory of its own below that. You may also name a
# parent of DIRECTORY.
_DEPTH = 3


class RunDirectory(Uncopyable):
    """The locks of a durable run, and its commits.

    Args:
        directory: Made, with its parents, if it is missing; only its owner may enter it then.
        maker: Program and version, written into commits for the errors of other versions.

    Raises:
        DurableRunError: Another process, or somebody else in this one, uses it.
        VolumeError: Others can write to it, or own it; it cannot be used; its file system has no locks.
    """

    def __init__(self, directory: Path, maker: str = "") -> None:
        self.path = directory
        self._maker = maker
        self._locks: dict[Path, int] = {}  # by directory, the descriptor that holds its lock
        _open_runs.add(self)  # so that a forked child closes it, and holds no lock
        self.lock(directory)
        with as_unwritable(directory), closed_unless_made(self.close):
            for left in directory.glob(f".{_PREFIX}*"):  # of a process that was killed while it wrote them
                if _PART_OF_COMMIT.fullmatch(left.name):
                    left.unlink(missing_ok=True)

    def __del__(self) -> None:
        self.close()

    def lock(self, directory: Path) -> None:
        """Lock a directory of the run until `close`. Made, with its parents, if it is missing.

        Raises:
            DurableRunError: Somebody else uses it.
            VolumeError: Others can write to it, or own it; it cannot be used; its file system has no locks, or it
                belongs to another program.
        """
        if directory in self._locks:
            return
        with as_unwritable(directory):
            make_directory(directory, 0o700)
            require_own_directory(directory)
            descriptor, is_new = _open_lock(directory / "lock")
        problem = f"{str(directory / 'lock')!r} cannot be locked"
        cure = "mount the file system with locks (Lustre: -o flock), or name a directory on a local drive"
        with closed_unless_made(os.close, descriptor):
            with as_volume_error(directory, problem, cure):
                try:
                    # The kernel unlocks it when the process ends.
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise DurableRunError.in_use(directory) from error
            _mark(directory, descriptor, is_new)
        self._locks[directory] = descriptor

    def claim(self, directory: Path, name: str) -> None:
        """Record in the lock of a directory that this file belongs to the run. Call it before the file is made.

        Raises:
            VolumeError: It cannot be noted; the file is there, and no run has made it.
        """
        names = _files_of_run(directory)
        if names is not None and name in names:
            return
        path = directory / name
        if os.path.lexists(path):
            raise VolumeError(
                directory,
                f"{str(path)!r} was not made by this run and would be overwritten; move it away, or name another directory",
            )
        with as_unwritable(directory):
            _append(self._locks[directory], name)

    def commits(self) -> list[int]:
        """Return the numbers of all commits, the newest first."""
        with as_unwritable(self.path):
            names = [path.name.removeprefix(_PREFIX) for path in self.path.glob(f"{_PREFIX}*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def newest(self) -> tuple[int, list[bytes]] | None:
        """Return the number and parts of the newest commit that is not damaged; None without any.

        Raises:
            DurableRunError: There are some, and none of them is; or another version wrote the newest.
        """
        failure: DurableRunError | None = None
        for number in self.commits():
            try:
                return number, self.read(number)
            except DurableRunError as error:
                if error.kind != "damaged":
                    raise
                logger.error("%s", error)
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    def write(self, number: int, parts: Sequence[bytes]) -> None:
        """Write a commit and sync it to the drive.

        Raises:
            OSError: It cannot be written, or a directory of the run has moved; the other commits are unchanged.
        """
        for directory, lock in self._locks.items():  # or the commit would be in another directory than its states
            if not os.path.samestat(os.stat(directory / "lock"), os.fstat(lock)):
                raise FileNotFoundError(errno.ENOENT, "another directory has taken its place", str(directory))
        head = _HEAD.pack(_MAGIC, FORMAT, len(parts), self._maker.encode()[:32])
        lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
        checksum = 0
        with replacing(self._path(number)) as file:
            os.fchmod(file.fileno(), 0o600)
            for piece in (head, lengths, *parts):
                file.write(piece)
                checksum = google_crc32c.extend(checksum, piece)
            file.write(struct.pack("<I", checksum))
        sync_directory(self.path)

    def read(self, number: int) -> list[bytes]:
        """Return the parts of a commit.

        Raises:
            DurableRunError: It is damaged, or another version wrote it.
        """
        path = self._path(number)
        try:
            # open_own() raises for a link, a pipe, or a file of another user.
            with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                data = file.read()
        except OSError as error:
            raise DurableRunError.damaged(path, error_words(error)) from error
        if len(data) < _HEAD.size + 4 or google_crc32c.value(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise DurableRunError.damaged(path, "its checksum is not that of its bytes")
        magic, version, num_parts, maker = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise DurableRunError.damaged(path, "it is not a commit")
        if version != FORMAT:
            raise DurableRunError.of_another_version(
                path, version, FORMAT, maker.rstrip(b"\0").decode(errors="replace") if version > 1 else ""
            )
        place = _HEAD.size + 8 * num_parts
        if num_parts > 64 or place > len(data):  # commits have a handful; the checksum was right, so a bug wrote it
            raise DurableRunError.damaged(path, f"it cannot have {num_parts} parts")
        parts = []
        for length in struct.unpack_from(f"<{num_parts}Q", data, _HEAD.size):
            parts.append(data[place : place + length])
            place += length
        if place != len(data) - 4:
            raise DurableRunError.damaged(path, "its parts have other lengths than it says")
        return parts

    def remove(self, number: int) -> None:
        """Remove a commit."""
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the locks. Idempotent."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _path(self, number: int) -> Path:
        return self.path / f"{_PREFIX}{number:010d}"


def _files_of_run(directory: Path) -> set[str] | None:
    """The names of the files that a run has claimed in its directory; None if no run has this directory."""
    try:
        with opened(directory / "lock", UNTRUSTED) as lock:
            lines = _lines(lock)
    except OSError:
        return None
    return set(lines[1:]) if lines[0] == _MARK else None


def _open_lock(path: Path) -> tuple[int, bool]:
    """Return a descriptor of the file, and whether it is new."""
    with contextlib.suppress(FileExistsError):  # O_EXCL tells which of several processes made it
        return open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
    return open_own(path, os.O_RDWR), False


def _mark(directory: Path, lock: int, is_new: bool) -> None:
    """Write the mark of a run into its lock, unless it has it."""
    with as_unwritable(directory):
        lines = _lines(lock)
        if lines[0] == _MARK:
            return
        # An empty lock alone in its directory: a process was killed before it wrote the mark. Other files beside it
        # mean that another program uses the name.
        if lines == [""] and (is_new or os.listdir(directory) == ["lock"]):
            _append(lock, _MARK)
            sync_directory(directory)
            return
    raise VolumeError(
        directory,
        f"{str(directory / 'lock')!r} is not the lock of a durable run: another program uses {str(directory)!r}; "
        "name another directory",
    )


def _lines(lock: int) -> list[str]:
    """Return the lines of a lock, at least one. A last line without "\\n" was cut off by a crash, and is dropped."""
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        raise OSError(errno.EINVAL, "'lock' in it is not a file")
    text = os.pread(lock, _MOST_MARK_BYTES, 0).decode(errors="replace")
    return text.split("\n")[:-1] or [text]


def _append(lock: int, line: str) -> None:
    os.pwrite(lock, f"{line}\n".encode(), os.fstat(lock).st_size)
    os.fsync(lock)


# A forked child that outlives its parent would otherwise hold the lock.
_open_runs: LiveObjects[RunDirectory] = LiveObjects(in_child=lambda run: run.close())


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
                    is_in_use=is_locked(path / "lock"),
                )
            )
    return found


def bytes_of_run(directory: Path) -> int:
    """Return the space that a run's states take in a directory: a resumed run needs no other space for them."""
    # st_blocks counts units of 512 bytes. lstat: the size of a link's target is not in this directory.
    return sum(file.lstat().st_blocks * 512 for file in directory.glob("states-*") if _STATES.fullmatch(file.name))


@dataclass(frozen=True)
class LeftSave:
    """A hidden directory of a killed save. `swapper.volumes.publish.remove_abandoned` of its parent directory removes it.

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
    claimed = _files_of_run(path)
    if claimed is None:
        return
    # Only files that the run has marked or claimed: another program's file may have such a name.
    found = [file for file in sorted(path.iterdir()) if file.is_file() and not file.is_symlink()]
    yield from (file for file in found if _PART_OF_COMMIT.fullmatch(file.name) or _is_commit(file))
    yield from (file for file in found if file.name in claimed and _STATES.fullmatch(file.name))
    yield path / "lock"


def _is_commit(file: Path) -> bool:
    if _COMMIT.fullmatch(file.name) is None or not os.access(file, os.R_OK):
        return False
    with file.open("rb") as commit:
        return commit.read(len(_MAGIC)) == _MAGIC


def _folders(directory: Path, depth: int) -> Iterator[Path]:
    yield directory
    with os.scandir(directory) as entries:
        below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False)) if depth else []
    for path in below:
        if os.access(path, os.R_OK | os.X_OK):
            yield from _folders(Path(path), depth - 1)
