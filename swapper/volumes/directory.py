"""Where scratch space may lie, as a user gives it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.config import ALIGNMENT
from swapper.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory for scratch space, on a drive of its own if it is to add bandwidth.

    Attributes:
        path: The directory; it must exist.
        capacity_bytes: Take no more space than this there; as much as is free by default.
        bytes_per_second: How fast the drive is, for sharing the work out with others; `Swapper.open` measures
            it by default.
    """

    path: Path
    capacity_bytes: int | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "path", Path(self.path))  # a str will do
        if self.capacity_bytes is not None and self.capacity_bytes < ALIGNMENT:
            raise ArgumentError(
                f"capacity_bytes of directory {str(self.path)!r} must be at least {ALIGNMENT}, got "
                f"{self.capacity_bytes}; leave the directory out if it is not to be used"
            )
        speed = self.bytes_per_second
        if speed is not None and not (speed > 0 and math.isfinite(speed)):
            raise ArgumentError(f"bytes_per_second of directory {str(self.path)!r} must be positive, got {speed}")


DirectoryLike = Directory | str | os.PathLike[str]
"""One directory: a path, or a path with what may be used of it."""


def as_directories(directories: Sequence[DirectoryLike] | DirectoryLike) -> list[Directory]:
    """Return one directory or many as a list.

    Raises:
        ArgumentError: None is given.
    """
    if isinstance(directories, (Directory, str, os.PathLike)):
        directories = [directories]
    found = [each if isinstance(each, Directory) else Directory(Path(each)) for each in directories]
    if not found:
        raise ArgumentError("no directory given; name at least one for the scratch files")
    return found
