"""Full and small drives: an error at the start, in words, and nothing left behind; never in the middle of the work."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swapper import Swapper, SwapperConfig, Volume, VolumeError, VolumeTooSmallError
from swapper.backends import ThreadsBackend
from tests.conformance.suite import run_conformance

pytestmark = pytest.mark.root

_MIB = 1 << 20


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def test_a_drive_that_others_fill_meanwhile_does_not_matter(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(8 * _MIB)
    with Swapper.open([directory], 4 * _MIB, SwapperConfig(deadline_seconds=20.0)) as swapper:
        with open(directory / "others", "wb") as others, pytest.raises(OSError, match="No space left"):
            others.write(bytes(8 * _MIB))
            others.flush()
        assert _free_bytes(directory) == 0
        extent = swapper.allocate(4 * _MIB, "x")
        data = np.random.default_rng(0).integers(0, 256, 4 * _MIB, dtype=np.uint8)
        copy = np.empty_like(data)
        swapper.write(extent, data)
        swapper.read(extent, copy).wait()
        assert np.array_equal(data, copy)


def test_close_gives_the_space_back(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(8 * _MIB)
    free_bytes = _free_bytes(directory)
    for _ in range(3):
        with Swapper.open([directory], 8 * _MIB - 64 * 1024):
            assert _free_bytes(directory) < _MIB
    assert _free_bytes(directory) == free_bytes


def test_a_full_drive_has_no_room_for_a_file(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(_MIB)
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(directory)], check=True)
    (directory / "last").touch()
    with pytest.raises(VolumeTooSmallError, match="no room for a file"):
        Swapper.open([directory], 4096)


def test_a_read_only_drive(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(_MIB)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    with pytest.raises(VolumeError, match=r"Read-only file system \(errno 30, EROFS"):
        Swapper.open([directory], 4096)


def test_tmpfs_passes_the_conformance_suite(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(32 * _MIB)
    assert run_conformance(lambda capacity_bytes: ThreadsBackend(Volume([directory], capacity_bytes))) >= 10
