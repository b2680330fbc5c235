"""Scratch space on drives: reserved when it is opened, and striped by the drives' speed and free space."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence

from swapper.config import ALIGNMENT, round_up
from swapper.errors import ArgumentError, VolumeError, VolumeTooSmallError
from swapper.uncopyable import Uncopyable, closed_unless_made
from swapper.volumes.directory import Directory, DirectoryLike, as_directories
from swapper.volumes.file_system import describe_drive
from swapper.volumes.scratch_file import NamedFile, ScratchFile
from swapper.volumes.striping import Space, StripeMap
from swapper.volumes.thread_pool import ThreadPool

logger = logging.getLogger(__name__)


FileRange = tuple[int, int, int, int]
"""Index of a file, offset in it, and the first and last + 1 of the requested bytes that are stored there."""


class Volume(Uncopyable):
    """One address space over scratch files, striped if there are several directories.

    Drives get stripes in proportion to their speeds, if these are given: see ``swapper/volumes/striping.py``. A
    directory gives at most its capacity or its free space, and the others give the rest. Exactly the used space is
    reserved.

    Args:
        directories: One directory per drive, at least one.
        capacity_bytes: Size of the address space; rounded up to whole stripes, or to 4096 in a single directory.
        stripe_bytes: Length of a stripe. Multiple of 4096.
        direct: Bypass the page cache if the file system can.
        file_name: Prefix of the file's name in each directory. Named files outlive the process, and all drives then
            count as equally fast. By default, files have no names.
        is_there: The named files must exist already. They keep their contents at the same addresses, and never get
            shorter.

    Raises:
        VolumeError: A subclass says what is wrong with which directory. Nothing is left behind.
    """

    def __init__(
        self,
        directories: Sequence[DirectoryLike] | DirectoryLike,
        capacity_bytes: int,
        *,
        stripe_bytes: int = 1 << 20,
        direct: bool = True,
        file_name: str = "",
        is_there: bool = False,
    ) -> None:
        wanted = as_directories(directories)
        if capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes cannot be negative, got {capacity_bytes}")
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ArgumentError(f"stripe_bytes must be a positive multiple of {ALIGNMENT}, got {stripe_bytes}")
        self.stripe_bytes = stripe_bytes if len(wanted) > 1 else 0  # 0: one file, and no stripes
        self.capacity_bytes = round_up(capacity_bytes, self.stripe_bytes or ALIGNMENT)
        self._map: StripeMap | None = None  # None without stripes
        self.files: tuple[ScratchFile, ...] = ()
        with closed_unless_made(self.close):
            for column, directory in enumerate(wanted, 1):
                # One by one into the tuple, so that an error in a later directory closes the earlier files.
                drive = describe_drive(directory.path)
                name = f"{file_name}-{column}-of-{len(wanted)}"
                file = NamedFile(drive, name, is_there=is_there) if file_name else ScratchFile(drive)
                self.files = (*self.files, file)
            _refuse_duplicates(self.files)
            _warn_of_shared_drives(self.files)
            # A run that asks for less than before keeps its size: the place of each stripe follows from the lengths.
            held_bytes = sum(file.num_bytes for file in self.files) if is_there else 0
            self.capacity_bytes = max(self.capacity_bytes, round_up(held_bytes, self.stripe_bytes or ALIGNMENT))
            if self.stripe_bytes:
                self._share_out(wanted, is_named=bool(file_name), stays=is_there)
            else:
                self._take_all(wanted[0])
            for file in self.files:
                file.bypass_page_cache(direct)  # after the reservation: it is tried on the file's first block
        for file in self.files:
            _warn(file, direct)

    @property
    def is_direct(self) -> bool:
        """Whether all files bypass the page cache."""
        return all(file.is_direct for file in self.files)

    @property
    def is_network(self) -> bool:
        """Whether another machine (or a FUSE process) serves one of the files."""
        return any(file.drive.is_network for file in self.files)

    def locate(self, offset: int) -> tuple[ScratchFile, int]:
        """Return the file and the offset in it of a byte of the address space."""
        column, file_offset, *_ = self.file_ranges(offset, 1)[0]
        return self.files[column], file_offset

    def file_ranges(self, offset: int, num_bytes: int) -> list[FileRange]:
        """Return where bytes of the address space are stored, in their order; one range at least."""
        if self._map is None or not num_bytes:
            return [(0, offset, 0, num_bytes)]
        return self._map.file_ranges(offset, num_bytes)

    def sync(self) -> None:
        """Sync all files to their drives, at once.

        Raises:
            OSError: A drive failed. Written bytes may be lost, also if another sync succeeds.
        """
        with ThreadPool(len(self.files)) as pool:
            pool.map(os.fdatasync, [file.fd for file in self.files])

    def describe(self) -> str:
        """Return one line for logs."""
        ways = ", ".join(
            f"{str(file.directory)!r} on {file.drive.words()}"
            f"{f', {file.num_bytes} bytes' if self.stripe_bytes else ''}"
            f" ({'direct' if file.is_direct else 'page cache: ' + file.buffered_because})"
            for file in self.files
        )
        return f"{self.capacity_bytes} bytes in {ways}"

    def close(self) -> None:
        """Close all files, which frees their space. Idempotent."""
        for file in self.files:
            file.close()

    def _take_all(self, directory: Directory) -> None:
        limit_bytes = directory.capacity_bytes
        if limit_bytes is not None and limit_bytes < self.capacity_bytes:
            given_bytes = min(limit_bytes, self.files[0].num_bytes + self.files[0].drive.free_bytes)
            raise VolumeTooSmallError(
                directory.path, self.capacity_bytes, given_bytes, f"its capacity_bytes is {limit_bytes}"
            )
        self.files[0].reserve(self.capacity_bytes)

    def _share_out(self, directories: Sequence[Directory], *, is_named: bool, stays: bool) -> None:
        """Decide which drive stores which stripes, and reserve exactly their space. ``stays``: see `Space`."""
        held_bytes = [file.num_bytes if stays else 0 for file in self.files]
        space = Space(directories, self.files, self.capacity_bytes, self.stripe_bytes, is_named, stays)
        known = [each.bytes_per_second for each in directories if each.bytes_per_second is not None]
        default = sum(known) / len(known) if known else 1.0  # only ratios count
        speeds = [1.0 if is_named else each.bytes_per_second or default for each in directories]
        try:
            while True:  # each failure takes at least one stripe from a drive, until space.lessen() raises
                stripes = space.share_out(speeds)
                try:
                    self._reserve(stripes, held_bytes)
                    break
                except VolumeTooSmallError as error:
                    # File systems need space for metadata, quotas are not shown, and other processes write meanwhile.
                    # So the next try asks for what is free now, and for at least 3 % less: few tries reach any size.
                    less_bytes = min(error.free_bytes, error.needed_bytes - error.needed_bytes // 32)
                    column = [file.directory for file in self.files].index(error.directory)
                    space.lessen(column, less_bytes, "found when reserving")
        except BaseException:
            for file, num_bytes in zip(self.files, held_bytes, strict=True):
                with contextlib.suppress(VolumeError):
                    # Back to the lengths that the run's stripes follow from.
                    file.reserve(min(num_bytes, file.num_bytes))
            raise
        self._map = stripes
        self._log_capacities(stripes, speeds)

    def _reserve(self, stripes: StripeMap, held_bytes: Sequence[int]) -> None:
        for column, file in enumerate(self.files):
            if stripes.file_bytes(column) < held_bytes[column]:
                raise VolumeError(
                    file.directory,
                    f"{file.name} holds {held_bytes[column]} bytes of a run, and only {stripes.file_bytes(column)} of it would "
                    "be used now: name the same directories, with room for as much on each",
                )
        # Files that shrink come first: others may need their space, on the same file system.
        for grows in (False, True):
            for column, file in enumerate(self.files):
                num_bytes = stripes.file_bytes(column)
                if (num_bytes > file.num_bytes) is grows:
                    file.reserve(num_bytes)

    def _log_capacities(self, stripes: StripeMap, speeds: Sequence[float]) -> None:
        cycle = stripes.first_cycle
        described = "; ".join(
            f"{str(file.directory)!r} on {file.drive.words()}: {cycle.count(column)} of {len(cycle)} stripes"
            f"{f' at {speeds[column] / 1e6:.0f} MB/s' if max(speeds) > 1 else ''}, {file.num_bytes} bytes in all"
            for column, file in enumerate(self.files)
        )
        logger.info("striped over %d directories: %s", len(self.files), described)


def _refuse_duplicates(files: Sequence[ScratchFile]) -> None:
    """Refuse a directory that is named twice, also by another path, a link or a bind mount."""
    seen: dict[tuple[int, int], ScratchFile] = {}
    for file in files:
        try:
            status = os.stat(file.directory)
        except OSError as error:
            raise VolumeError(file.directory, f"directory {str(file.directory)!r} is gone: {error}") from error
        # A bind mount has the device and inode of its directory, so it is found as well.
        other = seen.setdefault((status.st_dev, status.st_ino), file)
        if other is not file:
            raise ArgumentError(
                f"a directory is given twice, as {str(other.directory)!r} and as {str(file.directory)!r}; "
                "name each drive once"
            )


def _warn_of_shared_drives(files: Sequence[ScratchFile]) -> None:
    for identity, count in Counter(file.drive.identity for file in files).items():
        if count > 1:
            names = ", ".join(repr(str(file.directory)) for file in files if file.drive.identity == identity)
            logger.warning(
                "%s are on one drive (%s): two directories on one drive do not add bandwidth", names, identity
            )


def _warn(file: ScratchFile, direct: bool) -> None:
    name, drive = str(file.directory), file.drive
    if drive.is_tmpfs:
        logger.warning("directory %r is %s: its files are in RAM, not on a drive", name, drive.file_system)
    if drive.is_network:
        logger.warning("directory %r is a network file system (%s): expect it to be slow", name, drive.file_system)
    if direct and not file.is_direct:
        logger.warning("%s goes through the page cache: %s", file.name, file.buffered_because)
