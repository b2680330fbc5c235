"""Directories for scratch space, as a user names them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.config import ALIGNMENT, whole_number
from swapper.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory for scratch space, on a drive of its own if it is to add bandwidth.

    Attributes:
        path: The directory; it must exist.
        capacity_bytes: Limit on the space used there; by default all free space.
        bytes_per_second: Speed of the drive, which decides its part of the stripes; by default `Swapper.open` measures
            it.
    """

    path: Path
    capacity_bytes: int | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "path", _path(self.path))  # a str will do
        if self.capacity_bytes is not None:
            object.__setattr__(self, "capacity_bytes", whole_number("capacity_bytes", self.capacity_bytes))
        if self.capacity_bytes is not None and self.capacity_bytes < ALIGNMENT:
            raise ArgumentError(
                f"capacity_bytes of directory {str(self.path)!r} must be at least {ALIGNMENT}, got "
                f"{self.capacity_bytes}; leave the directory out if it is not to be used"
            )
        speed: object = self.bytes_per_second
        if speed is not None and not (isinstance(speed, int | float) and speed > 0 and math.isfinite(speed)):
            raise ArgumentError(f"bytes_per_second of directory {str(self.path)!r} must be positive, got {speed}")


def _path(value: object) -> Path:
    try:
        text = os.fsdecode(os.fspath(value))  # type: ignore[call-overload]
    except TypeError:
        raise ArgumentError(f"a directory must be a path, got {value!r}; pass a str or a Path") from None
    if not text or "\0" in text:
        raise ArgumentError(f"a directory cannot be {value!r}; name one, '.' for the working directory")
    return Path(text)


DirectoryLike = Directory | str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""One directory: a path, or a path with what may be used of it."""


def as_directories(directories: Sequence[DirectoryLike] | DirectoryLike) -> list[Directory]:
    """Return one directory or many as a list.

    Raises:
        ArgumentError: None is given, or something else than a path.
    """
    if isinstance(directories, (Directory, str, bytes, os.PathLike)):
        directories = [directories]
    if not isinstance(directories, Iterable):
        raise ArgumentError(f"directories must be paths, got {directories!r}; pass a list of str or Path")
    found = [each if isinstance(each, Directory) else Directory(_path(each)) for each in directories]
    if not found:
        raise ArgumentError("no directory given; name at least one for the scratch files")
    return found
