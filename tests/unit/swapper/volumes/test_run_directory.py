"""Who may use the directory of a durable run."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swapper import DurableRunError, RunDirectory, SwapperConfig, Versions, VolumeError
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
    assert not Counter(open_files(tmp_path)) - Counter(before)
    run = RunDirectory(tmp_path)
    with pytest.raises(DurableRunError, match="is in use"):
        RunDirectory(tmp_path)
    run.close()


@pytest.mark.parametrize("version", [0, 3])
def test_another_format_is_named_and_nothing_older_is_taken(version: int, tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path)) as run:
        run.write(1, [b"old"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swapper.volumes.run_directory.FORMAT", version)
            run.write(2, [b"new"])
        with pytest.raises(DurableRunError, match=f"has format {version}, and this version knows format 2"):
            run.newest()


@pytest.mark.parametrize("call", ["open", "stat", "fstat", "statvfs", "ftruncate", "fsync"])
def test_whatever_fails_while_a_run_is_opened_is_told_and_leaves_nothing_open(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of the system fails, then the second, and so on, until all of them are behind."""
    config, states = SwapperConfig(num_threads=1, backend="threads"), tmp_path / "states"
    states.mkdir()
    real, before = getattr(os, call), open_files(tmp_path)
    for nth in range(1, 100):
        num_calls = 0

        def fails(*args: Any, nth: int = nth, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        run: RunDirectory | None = None
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            try:
                run = RunDirectory(tmp_path / "run")
                versions = Versions.open(run, [states], 1 << 20, 4 << 20, config)
            except VolumeError as error:
                assert "Input/output error" in str(error)
            else:
                versions.swapper.close()
        if run is not None:
            run.close()
        assert not Counter(open_files(tmp_path)) - Counter(before)
        for left in states.glob("states-*"):
            left.unlink()
        if num_calls < nth:
            break
    assert num_calls < nth and (nth > 1 or call == "ftruncate")


def _opened(run: Path, states: Path) -> None:
    with closing(RunDirectory(run)) as directory:
        config = SwapperConfig(num_threads=1, backend="threads")
        Versions.open(directory, [states], 1 << 20, 4 << 20, config).swapper.close()


@pytest.mark.parametrize("name", ["lock", "states-1-of-1", "lock of a run"])
@pytest.mark.parametrize("place", ["run", "states"])
def test_a_file_of_another_program_is_refused_and_stays(name: str, place: str, tmp_path: Path) -> None:
    run, states = tmp_path / "run", tmp_path / "states"
    for folder in (run, states):
        folder.mkdir()
    file = tmp_path / place / ("lock" if name != "states-1-of-1" else name)
    file.write_bytes(b"infinity durable run, it says" if name == "lock of a run" else b"mine")
    if (name, place) == ("states-1-of-1", "run"):
        return _opened(run, states)  # only where states are kept would it be overwritten
    with pytest.raises(VolumeError, match=r"another program|would be overwritten|so it is not used"):
        _opened(run, states)
    assert file.read_bytes() in (b"mine", b"infinity durable run, it says")
    return None


def test_a_run_goes_on_with_the_files_that_it_made(tmp_path: Path) -> None:
    for _ in range(2):
        _opened(tmp_path, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "states-1-of-1"]
