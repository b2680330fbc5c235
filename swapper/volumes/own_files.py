"""Checks of files and directories whose names other users can guess.

Another user can make them first, to read or change what a run stores there. By a link, this process could be made to
write to one of its user's own files. So they are used only if this user owns them, and nobody else can write to the
directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from swapper.errors import VolumeError
from swapper.uncopyable import closed_unless_made

UNTRUSTED = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open files with that another user may have replaced by a link, or by a pipe, for which open() would wait."""


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or a directory; its descriptor is closed when the ``with`` block ends."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def require_own_directory(directory: Path) -> None:
    """Check that this user owns a directory, and that nobody else can make or replace files in it.

    Raises:
        VolumeError: Somebody else owns it or a link to it, or others can write to it.
        OSError: It cannot be looked at.
    """
    link = os.lstat(directory)
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():  # its owner could point it elsewhere at any time
        raise VolumeError.not_own(directory, f"is a symbolic link of user {link.st_uid}")
    found = os.stat(directory)
    if found.st_uid != os.geteuid():
        raise VolumeError.not_own(
            directory, f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written to by other users (mode {stat.S_IMODE(found.st_mode):o})"
        raise VolumeError.not_own(directory, problem, cure=f"run `chmod go-w {directory}` if only you have used it")


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open or make a file, which no link leads to or from, and return its descriptor. Never waits.

    Args:
        path: Of the file.
        flags: As `os.open` takes them.
        mode: Of a new file.

    Raises:
        VolumeError: It is a link, a pipe or a device, has a second name, or somebody else owns it.
        OSError: It cannot be opened.
    """
    if path.is_symlink():
        raise VolumeError.not_own(path, "is a symbolic link")
    # O_NONBLOCK is cleared below, because io_uring would then fail a transfer with EAGAIN instead of waiting for the
    # drive.
    descriptor = os.open(path, flags | UNTRUSTED | os.O_NOCTTY, mode)
    with closed_unless_made(os.close, descriptor):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise VolumeError.not_own(path, "is not a regular file")
        if found.st_uid != os.geteuid():
            problem = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
            raise VolumeError.not_own(path, problem)
        if found.st_nlink > 1:  # by a hard link, too, a write would change another file
            raise VolumeError.not_own(path, "has a second name elsewhere (a hard link)")
        os.set_blocking(descriptor, True)
    return descriptor
