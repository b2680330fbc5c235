"""One file of scratch space: reserved when it is opened, gone when the process is gone; and one that outlives it.

The former is made without a name (O_TMPFILE), or unlinked at once if the file system cannot do that. So nothing is left after
any kind of exit, and two processes that use one directory never use the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from swapper.config import ALIGNMENT
from swapper.errors import VolumeError, VolumeTooSmallError, as_unwritable, as_volume_error, error_words
from swapper.memory.region import AlignedRegion
from swapper.sync.lifetimes import LiveObjects
from swapper.uncopyable import Uncopyable, closed_unless_made
from swapper.volumes.file_system import Drive
from swapper.volumes.own_files import open_own
from swapper.volumes.publish import sync_directory

logger = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})  # of a transfer: the file system has no direct I/O
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})  # fallocate does not work here
_FILL_BYTES = 8 << 20  # of zeros, in one write
_FILL_CHECK_BYTES = 64 << 20  # written before it is checked whether they took any space
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_NOCOW_FL = 0x80086601, 0x40086602, 0x00800000  # of <linux/fs.h>, 64 bits


class ScratchFile(Uncopyable):
    """One nameless file with reserved space.

    Args:
        drive: The drive and directory in which it is made.

    Raises:
        VolumeError: A subclass says what is wrong with the directory.
    """

    __slots__ = ("__weakref__", "buffered_because", "directory", "drive", "fd", "name", "num_bytes")

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.directory = drive.path
        self.num_bytes = 0
        self.name = f"the scratch file in {str(drive.path)!r} on {drive.words()}"
        self.buffered_because = "not tried yet"
        self.fd = -1  # for __del__, if _open() raises
        self.fd = self._open()
        _open_files.add(self)

    def __del__(self) -> None:
        # Workers of a swapper that nobody closed hold the file until they have ended.
        self.close()

    def _open(self) -> int:
        return open_nameless(self.directory)

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return not self.buffered_because

    def reserve(self, num_bytes: int) -> None:
        """Give the file a length and take the space for it from the file system.

        Raises:
            VolumeTooSmallError: There is not enough.
            VolumeError: It cannot be reserved for another reason.
        """
        problem = f"cannot reserve {num_bytes} bytes in directory {str(self.directory)!r} on {self.drive.words()}"
        with as_volume_error(self.directory, problem, "choose another one"):
            if num_bytes < self.num_bytes:  # a smaller share of a volume, after another drive gave more
                os.ftruncate(self.fd, num_bytes)
            elif num_bytes > self.num_bytes:
                self._grow(num_bytes)
        self.num_bytes = num_bytes

    def _grow(self, num_bytes: int) -> None:
        with taking_space(self.fd, self.directory, num_bytes, own_bytes=self.num_bytes):
            if not self.num_bytes and self.drive.file_system == "btrfs":  # it takes the flag for empty files only
                write_in_place(self.fd)
            try:
                reserve_space(self.fd, num_bytes, otherwise=lambda: self._fill(num_bytes))
            except OSError as error:
                if error.errno in FULL or error.errno == errno.EFBIG:  # return the space that it got before it failed
                    os.ftruncate(self.fd, self.num_bytes)
                raise

    def _fill(self, num_bytes: int) -> None:
        """Take the space by writing zeros, or none if the file system does not give any for them.

        That is as fast as the drive writes; what libc does instead, a small write into each block, takes hours per TiB.
        """
        logger.info(
            "%s: %s cannot reserve space, so %d bytes are written", self.name, self.drive.file_system, num_bytes
        )
        first, checked = self.num_bytes, min(self.num_bytes + _FILL_CHECK_BYTES, num_bytes)
        _write_zeros(self.fd, first, checked)
        os.fsync(self.fd)  # a network file system may say only now that there is no room
        # Some file systems compress zeros away, or count no blocks: if less than half of the zeros took space, more of
        # them reserve nothing. st_blocks counts units of 512 bytes.
        if os.fstat(self.fd).st_blocks * 512 < checked - (checked - first) // 2:
            os.ftruncate(self.fd, num_bytes)
            logger.warning(
                "%s has no reserved space, because %s cannot reserve any: keep %d bytes free there",
                self.name,
                self.drive.file_system,
                num_bytes,
            )
        else:
            _write_zeros(self.fd, checked, num_bytes)
            os.fsync(self.fd)

    def bypass_page_cache(self, direct: bool) -> None:
        """Use direct transfers if they are wanted and work; else set ``buffered_because`` to the reason.

        Raises:
            VolumeError: The drive fails.
        """
        _set_direct(self.fd, False)
        self.buffered_because = "direct=False"
        if direct:
            with as_volume_error(self.directory, f"{self.name} cannot be used"):
                self.buffered_because = _try_direct(self.fd)

    def close(self) -> None:
        """Close the file, which returns its space to the file system. Idempotent."""
        fd, self.fd = self.fd, -1  # first: a second close, of __del__, must not close another file of this number
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:  # the number is free all the same, and whatever else is to be closed must be
                logger.error("%s was closed with an error: %s", self.name, error_words(error))


class NamedFile(ScratchFile):
    """A file of a durable run: with a name and reserved space, and only its owner may read it.

    Args:
        drive: The drive and directory of the file.
        file_name: Its name there. An existing file keeps its contents.
        is_there: It must exist already; else it is made, and its name is synced to the drive.

    Raises:
        VolumeError: The file is not this user's alone; or the directory is missing, or cannot be used.
    """

    __slots__ = ("file_name", "is_there")

    def __init__(self, drive: Drive, file_name: str, *, is_there: bool = False) -> None:
        self.file_name = file_name
        self.is_there = is_there
        super().__init__(drive)
        self.name = f"{str(drive.path / file_name)!r} on {drive.words()}"
        with as_unwritable(self.directory), closed_unless_made(self.close):
            self.num_bytes = os.fstat(self.fd).st_size

    def _open(self) -> int:
        path = self.directory / self.file_name
        try:
            # "states-2-of-3" must not appear beside "states-1-of-2": then directories were added, or are in another
            # order.
            others = [other.name for other in self.directory.glob(f"{self.file_name.split('-')[0]}-*-of-*")]
            if others and path.name not in others:
                raise VolumeError(
                    self.directory,
                    f"{str(self.directory)!r} holds {others[0]} of a run, and is now to hold {path.name}: name the same "
                    "directories in the same order, or remove the run's directories to begin anew",
                )
            if self.is_there:
                return open_own(path, os.O_RDWR)
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
            with closed_unless_made(os.close, descriptor):
                sync_directory(self.directory)
            return descriptor
        except FileNotFoundError as error:
            raise VolumeError(
                self.directory,
                f"{str(path)!r} is missing, which the commits of the run need: name the same directories in the same order, "
                "or remove the run's directories to begin anew",
            ) from error
        except OSError as error:
            raise VolumeError.unwritable(self.directory, error) from error


def fallocate(fd: int, num_bytes: int, offset: int = 0, mode: int = 0) -> None:
    """Have the kernel give a file bytes, its first ones by default, as ``fallocate(2)`` does; unlike libc's
    ``posix_fallocate`` never by writing into each block.

    Raises:
        OSError: There is no room; the file system cannot do that (EOPNOTSUPP); there is no such call here (ENOSYS).
    """
    while _fallocate(fd, mode, offset, num_bytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:  # ctypes does not repeat a call that a signal cut off, as functions of `os` do
            raise OSError(code, os.strerror(code))


def reserve_space(
    fd: int, num_bytes: int, offset: int = 0, mode: int = 0, *, otherwise: Callable[[], object] | None = None
) -> None:
    """As `fallocate`; where the file system cannot reserve space, call ``otherwise``, or write zeros.

    Raises:
        OSError: There is no room.
    """
    try:
        fallocate(fd, num_bytes, offset, mode)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        if otherwise is not None:
            otherwise()
        else:
            _write_zeros(fd, offset, offset + num_bytes)


@contextlib.contextmanager
def taking_space(fd: int, directory: Path, num_bytes: int, *, own_bytes: int = 0) -> Iterator[None]:
    """A file becomes ``num_bytes`` long in the ``with`` block, of which it has ``own_bytes``.

    Raises:
        VolumeTooSmallError: There is not so much room, found before the block or in it.
    """
    usage = shutil.disk_usage(fd)
    free_bytes = usage.free + own_bytes
    # First, because a reservation that fails half way would fill the drive for a moment, for all its users.
    # The total is 0 on file systems that report no sizes.
    if usage.total and free_bytes < num_bytes:
        raise VolumeTooSmallError(directory, num_bytes, free_bytes)
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise VolumeTooSmallError(directory, num_bytes, free_bytes, error_words(error)) from error
        raise


def _write_zeros(fd: int, offset: int, stop: int) -> None:
    """Write zeros to the bytes ``[offset, stop)`` of a file."""
    zeros = memoryview(bytes(_FILL_BYTES))
    while offset < stop:
        offset += os.pwrite(fd, zeros[: stop - offset], offset)


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write all bytes of a view to an offset of a file."""
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate  # musl has the latter only
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

# A forked child that outlives its parent would otherwise keep the parent's space on the drive occupied.
_open_files: LiveObjects[ScratchFile] = LiveObjects(in_child=lambda file: file.close())


def open_nameless(directory: Path) -> int:
    """A descriptor of a new file without a name, open for reading and writing."""
    try:
        if not directory.is_dir():
            problem = f"{str(directory)!r} is not a directory; scratch files need a directory of their drive"
            raise VolumeError(directory, problem)
        with tempfile.TemporaryFile(buffering=0, prefix=".swapper-", dir=directory) as file:
            return os.dup(file.fileno())  # a descriptor of our own, since the block closes the other
    except OSError as error:
        if error.errno in FULL:
            free_bytes = shutil.disk_usage(directory).free
            raise VolumeTooSmallError(directory, ALIGNMENT, free_bytes, "no room for a file") from error
        raise VolumeError.unwritable(directory, error) from error


def write_in_place(fd: int) -> None:
    """Turn copy-on-write off for an empty file, if its file system has that (btrfs)."""
    # With it, each write takes new space, and the reserved space does not count.
    with contextlib.suppress(OSError):
        flags = struct.unpack("i", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(4)))[0]
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("i", flags | _FS_NOCOW_FL))


def _set_direct(fd: int, is_direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))


def _try_direct(fd: int) -> str:
    """Turn O_DIRECT on and try it; return why it cannot be used, or nothing."""
    try:
        _set_direct(fd, True)
    except OSError as error:
        return f"the file system refuses O_DIRECT: {error_words(error)}"
    # Some file systems take the flag and refuse the transfer.
    region = AlignedRegion(ALIGNMENT)
    try:
        memory = region.array().data
        if os.fstat(fd).st_size >= ALIGNMENT:
            os.preadv(fd, [memory], 0)
            os.pwritev(fd, [memory], 0)  # the same bytes: a durable run's file keeps its contents
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        _set_direct(fd, False)
        return f"the file system refuses direct transfers of {ALIGNMENT} bytes: {error_words(error)}"
    return ""
