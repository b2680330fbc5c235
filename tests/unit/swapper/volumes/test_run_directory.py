"""Who may use the directory of a durable run."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

from swapper import NewerFormatError, RunDirectory, RunInUseError, VolumeError
from tests.open_files import open_files


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_called_in_use(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    before = open_files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(VolumeError, match=f"cannot be locked: .*{errno.errorcode[code]}.*-o flock") as caught:
            RunDirectory(tmp_path)
    assert type(caught.value) is VolumeError and caught.value.directory == tmp_path
    assert open_files(tmp_path) == before
    run = RunDirectory(tmp_path)
    with pytest.raises(RunInUseError):
        RunDirectory(tmp_path)
    run.close()


@pytest.mark.parametrize("version", [0, 2])
def test_another_format_is_named_and_nothing_older_is_taken(version: int, tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path)) as run:
        run.write(1, [b"old"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swapper.volumes.run_directory.FORMAT", version)
            run.write(2, [b"new"])
        with pytest.raises(NewerFormatError, match=f"has format {version}, and this version knows format 1"):
            run.newest()
