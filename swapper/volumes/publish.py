"""Atomic publication of files: after a crash at any moment, a directory holds all old files or all new ones.

[Note: durable order] New files are written to a hidden directory beside the old ones, and each is synced to the drive.
They are renamed to names that nothing refers to, and the directory is synced. Then one rename replaces the file that
refers to them, and the directory is synced again. Only now are older files removed. A lock on the directory keeps a
second process from doing the same meanwhile.

[Note: whose it is] Each hidden directory contains a lock file with a mark. Its writer locks the file first and writes
the mark then. So if the mark is there and nobody has the lock, a killed process has left the directory, and it is
removed. A directory without the mark only has a similar name, and belongs to somebody else. The lock is on a file,
because network file systems do not pass locks of directories on to other machines. NFS does so for files, and Lustre
with ``-o flock``.

[Note: no exchange] If the system cannot exchange two directories in one step, the old one first moves into the hidden
directory. Until the new one has its name, the old one is the only whole one. `put_back` then restores its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from swapper.uncopyable import closed_unless_made
from swapper.volumes.own_files import UNTRUSTED, opened
from swapper.volumes.thread_pool import ThreadPool

_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # missing in libc before glibc 2.28
_NUM_THREADS = 8  # files that are synced at a time
_HIDDEN = ".*.saving-*"
_LOCK, _REPLACED = ".lock", "replaced"  # names in a hidden directory
_MARK = b"swapper: files that are being saved\n"
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>


class Staging:
    """A context manager: a hidden directory for new files, removed when the ``with`` block ends.

    After an error it also removes parent directories that it has made, if they are empty.

    Attributes:
        path: where to write.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        """
        Args:
            directory: where the files will appear; made, with its parents, if it is missing.
            prefix: what the files have in common.
        """
        self._directory = directory
        self.path = directory / f".{prefix}.saving-{secrets.token_hex(8)}"
        self._lock: int | None = None
        self._missing: list[Path] = []

    def __enter__(self) -> Staging:
        self._missing = _missing(self._directory)
        with closed_unless_made(_remove_empty, self._missing):
            make_directory(self._directory)
            with locked(self._directory):
                _remove_abandoned(self._directory)
                self.path.mkdir(0o700)  # until it is published, nobody else can write to what is in it
                with closed_unless_made(_remove_hidden, self.path, None):
                    self._lock = mark(self.path)
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        _remove_hidden(self.path, self._lock)
        if kind is not None:  # of an exception
            _remove_empty(self._missing)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A new file in `path`, open for writing; it is on the drive when the ``with`` block has ended."""
        with (self.path / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def sync(self, name: str) -> None:
        """Sync a file in `path` that was not written by `file`."""
        _sync(self.path / name)

    def publish(
        self,
        unknown: Sequence[tuple[str, str]],
        replacing: Sequence[tuple[str, str]],
        head: tuple[str, str],
        is_old: Callable[[str], bool],
    ) -> None:
        """Move files into place, see [Note: durable order]. The caller holds the directory's lock, and has chosen final
        names under it.

        Args:
            unknown: pairs (name in `path`, name in the directory) that nothing refers to before ``head`` is there.
            replacing: pairs whose names may be those of present files.
            head: the pair of the file that refers to the unknown ones, or that a reader looks for first.
            is_old: whether a name in the directory is that of an older file, which goes in the end.
        """

        def remove_renamed() -> None:
            if (self.path / head[0]).exists():  # the head was not renamed: nothing refers to them
                for name, target in unknown:
                    if not (self.path / name).exists():  # it was renamed
                        remove(self._directory / target)

        # Example: weights in two shards. unknown are the shards under new names, replacing has config.json, head is the
        # index. A crash before the last rename leaves the old index with its shards; after it, the new index with its
        # own.
        with closed_unless_made(remove_renamed):
            for name, target in unknown:
                rename(self.path / name, self._directory / target)
            sync_directory(self._directory)  # their names are on the drive before the head is
            for name, target in (*(pair for pair in replacing if pair != head), head):  # the head last
                place = self._directory / target
                if place.parent != self._directory:
                    make_directory(place.parent)
                rename(self.path / name, place)
        sync_directory(self._directory)  # before the old files go: else a crash could leave neither head nor old files
        new = {target for _, target in (*unknown, *replacing, head)}
        for path in list(self._directory.iterdir()):
            if path.name not in new and is_old(path.name):
                remove(path)
        sync_directory(self._directory)


def remove_abandoned(directory: Path) -> None:
    """Remove hidden directories of killed processes, as far as possible."""
    with contextlib.suppress(OSError):
        # Else no lock is taken, in a directory that may be read-only.
        if next(directory.glob(_HIDDEN), None) is not None:
            with locked(directory):
                _remove_abandoned(directory)


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(_HIDDEN):
        lock = _lock_of_mark(path, os.O_RDWR, fcntl.LOCK_EX)
        if lock is not None:
            _remove_hidden(path, lock)


def _remove_hidden(path: Path, lock: int | None) -> None:
    try:
        # The prefix is the name of the directory to be replaced: ".step-7.saving-0f3a..." -> "step-7".
        put_back(path, path.parent / path.name[1:].rpartition(".saving-")[0])
        _empty(path)
    finally:
        if lock is not None:
            os.close(lock)
    with contextlib.suppress(OSError):  # something could not be removed: it is marked, and the next save tries again
        path.rmdir()


def _empty(folder: Path) -> None:
    """Remove the contents of a hidden directory."""
    with contextlib.suppress(OSError):  # the mark last: if this process is killed meanwhile, the rest is known as ours
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                os.unlink(entry.path)
        if os.listdir(folder) == [_LOCK]:
            os.unlink(folder / _LOCK)  # of a file that is open, NFS keeps the directory until it is closed


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path``, with its mode, when the ``with`` block ends without an error.

    A reader sees the old file or the new one, whole, also after a crash. A link stays a link.

    Raises:
        OSError: it cannot be written, or is no file; ``path`` is as it was.
    """
    path = Path(os.path.realpath(path))  # the target of a link is replaced, and not the link
    if os.path.lexists(path) and not path.is_file():  # a rename would replace /dev/null
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # beside it: a rename works in one file system
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        let_only_owner_write(partial)
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError as error:
        if error.filename is not None and os.fspath(error.filename) == str(partial):
            raise OSError(error.errno, error.strerror, str(path)) from error  # the name that the caller knows
        raise
    finally:
        remove(partial)  # of a failure; after success it has moved


def rename(source: Path, target: Path) -> None:
    """Give a new file its place, in one step."""
    let_only_owner_write(source)
    source.replace(target)


def let_only_owner_write(path: Path) -> None:
    """Take write access from group and others, whatever the umask was when the file or directory was made."""
    with contextlib.suppress(OSError):  # the file system has no modes
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & _OF_OTHERS:
            os.chmod(path, mode & ~_OF_OTHERS)


def opener(path: str, flags: int) -> int:
    """For ``open``: a file that is new lets only its owner write, whatever the umask."""
    return os.open(path, flags, 0o644)


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    path.unlink(missing_ok=True)


def make_directory(directory: Path, mode: int = 0o755) -> None:
    """Make a directory with ``mode``, and its parents, so that it is still there after a crash."""
    for path in reversed(_missing(directory)):  # each name is on the drive when its parent is synced
        path.mkdir(mode if path == directory else 0o755, exist_ok=True)
        sync_directory(path.parent)
    directory.mkdir(exist_ok=True)  # raises if it is no directory


def _missing(directory: Path) -> list[Path]:
    """The directory and its parents that do not exist, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def _remove_empty(directories: Sequence[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):  # ENOTEMPTY: somebody else uses it
            path.rmdir()


def sync_directory(directory: Path) -> None:
    """The names in it are on the drive when this returns."""
    _sync(directory)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time into the ``with`` block, if the file system can lock directories."""
    with opened(directory) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Before the close: a child that was forked meanwhile has the descriptor too, and would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def mark(folder: Path) -> int:
    """Mark a new directory as ours; return a descriptor that holds its lock. See [Note: whose it is]."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    with closed_unless_made(os.close, lock):
        # A file system without locks: _remove_abandoned() gets none there, and removes nothing.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _MARK)
        os.fsync(lock)
    return lock


def is_locked(file: Path) -> bool:
    """Whether another process has a file locked, or it cannot be opened."""
    try:
        with opened(file, UNTRUSTED) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def abandoned(directory: Path) -> list[Path]:
    """The directories that `remove_abandoned` removes."""
    found = []
    for path in sorted(directory.glob(_HIDDEN)):
        lock = _lock_of_mark(path, os.O_RDONLY, fcntl.LOCK_SH)
        if lock is not None:
            os.close(lock)
            found.append(path)
    return found


def _lock_of_mark(folder: Path, access: int, operation: int) -> int | None:
    """A descriptor that holds the lock of a directory (no link) that `mark` was called for.

    None: it has no mark, its writer is alive, or the file system has no locks.
    """
    if not folder.is_symlink():
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, access | UNTRUSTED)
            with closed_unless_made(os.close, lock):
                # One byte more than the mark: a longer file is not ours.
                if stat.S_ISREG(os.fstat(lock).st_mode) and os.pread(lock, len(_MARK) + 1, 0) == _MARK:
                    fcntl.flock(lock, operation | fcntl.LOCK_NB)
                    return lock
            os.close(lock)
    return None


def sync_tree(folder: Path) -> None:
    """Sync all files and directories below a folder, and let only their owner write to them."""
    # Many at a time: a journal commits all requests that wait for it together (measured, ext4: 16 to 23 times faster).
    paths = [Path(place, name) for place, _, names in os.walk(folder) for name in ("", *names)]
    with ThreadPool(_NUM_THREADS) as pool:
        pool.map(_sync_target, paths)


def _sync_target(path: Path) -> None:
    let_only_owner_write(path)
    _sync(path)


def _sync(path: Path) -> None:
    with opened(path) as descriptor:
        os.fsync(descriptor)


def exchange(source: Path, target: Path) -> None:
    """Move a directory to ``target``, in one step if the system can: see [Note: no exchange].

    The old directory is then at ``source``, or beside it under the name ``replaced``.

    Raises:
        OSError: it cannot get it; what was there before is there.
    """
    if not target.exists():
        source.replace(target)
    elif _renameat2 is None or _renameat2(_AT_FDCWD, bytes(source), _AT_FDCWD, bytes(target), _RENAME_EXCHANGE):
        with closed_unless_made(put_back, source.parent, target):
            target.replace(source.with_name(_REPLACED))
            source.replace(target)
    sync_directory(target.parent)


def put_back(aside: Path, target: Path) -> None:
    """Undo an `exchange` that was cut off: move the old directory from ``aside`` back, if ``target`` is missing.

    Raises:
        OSError: it stays in ``aside``.
    """
    replaced = aside / _REPLACED
    if replaced.is_dir() and not os.path.lexists(target):
        replaced.replace(target)
        sync_directory(target.parent)
