"""One file that outlives its process: of a durable run."""

from __future__ import annotations

import dataclasses
import os

from swapper.errors import UnwritableDirectoryError, error_words
from swapper.volumes.file_system import Drive
from swapper.volumes.scratch_file import ScratchFile


class NamedFile(ScratchFile):
    """Knows one file with a name and reserved space, which only its owner may read; must not know what is stored in it.

    Args:
        drive: What lies under the directory in which it is, or is made.
        file_name: Its name there. What it holds stays.

    Raises:
        VolumeError: A subclass says what is wrong with the directory.
    """

    __slots__ = ("file_name",)

    def __init__(self, drive: Drive, file_name: str) -> None:
        self.file_name = file_name
        super().__init__(drive)
        self.name = f"{str(drive.path / file_name)!r} on {drive.words()}"
        status = os.fstat(self.fd)
        self.num_bytes = status.st_size
        self.drive = dataclasses.replace(drive, free_bytes=drive.free_bytes + status.st_blocks * 512)

    def _open(self) -> int:
        try:
            return os.open(self.directory / self.file_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnwritableDirectoryError(self.directory, error_words(error)) from error
