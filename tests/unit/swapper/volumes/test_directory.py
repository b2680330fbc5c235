"""What names a directory, and what is refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swapper import ArgumentError, Directory, Swapper


class _Bytes:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> bytes:
        return os.fsencode(self._path)


def test_paths_of_any_kind(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), os.fsencode(tmp_path), _Bytes(tmp_path), Directory(tmp_path)):
        for directories in (path, [path]):
            with Swapper.open(directories, 4096) as swapper:  # type: ignore[arg-type]
                assert repr(str(tmp_path)) in swapper.describe()


@pytest.mark.parametrize("path", ["", b"", 3, None, 1.5, "a\0b", [""], [3], ["/", None], {"/": 1}.values()])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(ArgumentError, match=r"a directory (must|cannot) be|directories must be paths"):
        Swapper.open(path, 4096)  # type: ignore[arg-type]


def test_what_of_it_is_used() -> None:
    for capacity in (8192.0, True, "8192"):
        with pytest.raises(ArgumentError, match="capacity_bytes must be an int"):
            Directory(Path("/"), capacity_bytes=capacity)  # type: ignore[arg-type]
    for speed in (0, -1.0, float("nan"), "fast"):
        with pytest.raises(ArgumentError, match="bytes_per_second of directory '/' must be positive"):
            Directory(Path("/"), bytes_per_second=speed)  # type: ignore[arg-type]
