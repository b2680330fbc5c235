"""Scratch space on drives: reserved when it is opened, striped over directories, gone when the process is gone.

A scratch file never has a name that outlives its creation: it is made without one (O_TMPFILE), or unlinked at once
where the file system cannot do that. So nothing is left after any kind of exit, and two processes that use one
directory cannot meet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from swapper.config import ALIGNMENT, round_up
from swapper.errors import (
    ArgumentError,
    MissingDirectoryError,
    NotDirectoryError,
    UnwritableDirectoryError,
    VolumeError,
    VolumeTooSmallError,
)
from swapper.region import AlignedRegion
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_BE_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})


class ScratchFile(Uncopyable):
    """Knows one nameless file with reserved space; must not know what is stored in it."""

    __slots__ = ("__weakref__", "buffered_because", "directory", "fd", "name", "num_bytes")

    def __init__(self, directory: Path, num_bytes: int, direct: bool) -> None:
        self.directory = directory
        self.num_bytes = num_bytes
        self.name = f"the scratch file in {str(directory)!r}"
        self.buffered_because = ""
        self.fd = -1
        self.fd = _open_nameless(directory)
        try:
            _reserve(self.fd, directory, num_bytes)
            self.buffered_because = _switch_to_direct(self.fd) if direct else "direct=False"
        except BaseException:
            self.close()
            raise
        _open_files.add(self)

    def __del__(self) -> None:
        # Workers of a swapper that nobody closed hold the file until they have ended.
        self.close()

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return not self.buffered_because

    def close(self) -> None:
        """Close the file, with which its space goes back to the file system. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


_open_files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child that outlives its parent would otherwise keep the parent's space on the drive occupied.
    for file in list(_open_files):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _open_nameless(directory: Path) -> int:
    if not directory.exists():
        raise MissingDirectoryError(directory)
    if not directory.is_dir():
        raise NotDirectoryError(directory)
    try:
        if _O_TMPFILE:
            try:
                return os.open(directory, os.O_RDWR | _O_TMPFILE | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in _CANNOT_BE_UNNAMED:
                    raise
        fd, path = tempfile.mkstemp(prefix=".swapper-", dir=directory)
        try:
            os.unlink(path)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        if error.errno in _FULL:
            raise VolumeTooSmallError(directory, ALIGNMENT, _free_bytes(directory), "no room for a file") from error
        raise UnwritableDirectoryError(directory, _words(error)) from error


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def _words(error: OSError) -> str:
    return f"{error.strerror} (errno {error.errno}, {errno.errorcode.get(error.errno or 0, '?')})"


def _reserve(fd: int, directory: Path, num_bytes: int) -> None:
    if num_bytes == 0:
        return
    stat = os.fstatvfs(fd)
    free_bytes = stat.f_bavail * stat.f_frsize
    # Asked first, because a reservation that fails half way would fill the drive for a moment, for everybody on it.
    if stat.f_blocks and free_bytes < num_bytes:
        raise VolumeTooSmallError(directory, num_bytes, free_bytes)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:  # macOS: no reservation, only a size
            os.ftruncate(fd, num_bytes)
    except OSError as error:
        if error.errno in _FULL:
            raise VolumeTooSmallError(directory, num_bytes, _free_bytes(directory), _words(error)) from error
        raise VolumeError(
            directory,
            f"cannot reserve {num_bytes} bytes in directory {str(directory)!r}: {_words(error)}; choose another one",
        ) from error


def _switch_to_direct(fd: int) -> str:
    """Turn O_DIRECT on and try it; return why it cannot be used, or nothing."""
    if not _O_DIRECT:
        return "this platform has no O_DIRECT"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError as error:
        return f"the file system refuses O_DIRECT: {_words(error)}"
    # Some file systems take the flag and refuse the transfer.
    region = AlignedRegion(ALIGNMENT)
    try:
        memory = region.array().data
        if os.fstat(fd).st_size >= ALIGNMENT:
            os.pwritev(fd, [memory], 0)
            os.preadv(fd, [memory], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"the file system refuses direct transfers of {ALIGNMENT} bytes: {_words(error)}"
    return ""


class Volume(Uncopyable):
    """Knows scratch files and how one address space is striped over them; must not know extents.

        address   0 ........ stripe ........ 2 stripe ........ 3 stripe ...
        file      0          1               0                 1             (two directories)

    Args:
        directories: One directory per drive, at least one; a single path is taken as one.
        capacity_bytes: Size of the address space; rounded up so that all files are equally long.
        stripe_bytes: Length of a stripe. Multiple of 4096.
        direct: Bypass the page cache where the file system can.

    Raises:
        VolumeError: A subclass says what is wrong with which directory. Nothing is left behind.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        capacity_bytes: int,
        *,
        stripe_bytes: int = 1 << 20,
        direct: bool = True,
    ) -> None:
        paths = _paths(directories)
        if capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes cannot be negative, got {capacity_bytes}")
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ArgumentError(f"stripe_bytes must be a positive multiple of {ALIGNMENT}, got {stripe_bytes}")
        self.stripe_bytes = stripe_bytes if len(paths) > 1 else 0
        self.capacity_bytes = round_up(capacity_bytes, stripe_bytes * len(paths) if len(paths) > 1 else ALIGNMENT)
        self.files: tuple[ScratchFile, ...] = ()
        try:
            for path in paths:
                # One by one into the tuple, so that an error in a later directory closes the earlier files.
                self.files = (*self.files, ScratchFile(path, self.capacity_bytes // len(paths), direct))
        except BaseException:
            self.close()
            raise
        for file in self.files:
            if direct and not file.is_direct:
                logger.warning("%s goes through the page cache: %s", file.name, file.buffered_because)

    @property
    def is_direct(self) -> bool:
        """Whether all files bypass the page cache."""
        return all(file.is_direct for file in self.files)

    def locate(self, offset: int) -> tuple[ScratchFile, int]:
        """Return the file and the offset in it of a byte of the address space."""
        if not self.stripe_bytes:
            return self.files[0], offset
        stripe, within = divmod(offset, self.stripe_bytes)
        row, column = divmod(stripe, len(self.files))
        return self.files[column], row * self.stripe_bytes + within

    def describe(self) -> str:
        """Return one line for logs."""
        ways = ", ".join(
            f"{str(file.directory)!r} ({'direct' if file.is_direct else 'page cache: ' + file.buffered_because})"
            for file in self.files
        )
        return f"{self.capacity_bytes} bytes in {ways}"

    def close(self) -> None:
        """Close all files; their space goes back to the file systems. Idempotent."""
        for file in self.files:
            file.close()


def _paths(directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[Path]:
    if isinstance(directories, (str, os.PathLike)):
        directories = [directories]
    paths = [Path(directory) for directory in directories]
    if not paths:
        raise ArgumentError("no directory given; name at least one for the scratch files")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ArgumentError(f"a directory is given twice in {[str(path) for path in paths]}; name each drive once")
    return paths
