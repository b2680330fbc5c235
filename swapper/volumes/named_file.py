"""A file that outlives its process: of a durable run."""

from __future__ import annotations

import os

from swapper.errors import VolumeError, as_unwritable
from swapper.uncopyable import closed_unless_made
from swapper.volumes.file_system import Drive
from swapper.volumes.own_files import open_own
from swapper.volumes.publish import sync_directory
from swapper.volumes.scratch_file import ScratchFile


class NamedFile(ScratchFile):
    """A file with a name and reserved space, which only its owner may read.

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
