"""Large files that are written once: their space is reserved by the kernel, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swapper.volumes import block_files, scratch_file
from swapper.volumes.block_files import BlockFile, BlockThreads

_BLOCK_BYTES = 64 << 10


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, None])
def test_no_block_is_written_to_reserve_space(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libc does for file systems that cannot reserve any (NFSv3, FUSE): a small write into each."""

    def emulated(*_: int) -> None:
        raise AssertionError("libc writes into each block")

    def refusing(*_: int) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    if refusal is not None:
        monkeypatch.setattr(scratch_file, "fallocate", refusing)
    path = tmp_path / "file"
    file = BlockFile(path, 3 * _BLOCK_BYTES)
    assert (path.stat().st_size, path.stat().st_blocks > 0) == (3 * _BLOCK_BYTES, refusal is None)
    with BlockThreads(_BLOCK_BYTES) as threads:
        block = threads.acquire_block()
        block[:] = 7
        threads.write(file, block, _BLOCK_BYTES, 2 * _BLOCK_BYTES, lambda: None)
        threads.finish()
    file.release()
    assert path.read_bytes() == bytes(2 * _BLOCK_BYTES) + b"\7" * _BLOCK_BYTES


def test_a_full_drive_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratch_file, "fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        BlockFile(tmp_path / "file", _BLOCK_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_reports_no_sizes_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < block_files.free_bytes(tmp_path / "not" / "there") < 1 << 60
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([4096, 4096, *[0] * 8]))
    assert block_files.free_bytes(tmp_path) >= 1 << 60
