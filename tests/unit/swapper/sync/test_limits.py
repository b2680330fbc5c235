"""What the system refuses for its limits is said in words, and leaves no thread, file or memory behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import (
    AlignedRegion,
    BackendUnavailableError,
    LimitError,
    RunDirectory,
    Swapper,
    SwapperConfig,
    Versions,
    VolumeError,
)
from swapper.config import BackendName
from swapper.sync.limits import limits_in_words, start_threads
from tests.open_files import open_files

_SIZE = 1 << 20


def _open(backend: BackendName, path: Path) -> Swapper:
    return Swapper.open(path, _SIZE, SwapperConfig(num_threads=2, backend=backend))


_MAKERS: dict[str, Callable[[Path], object]] = {
    "threads": lambda path: _open("threads", path),
    "aiofiles": lambda path: _open("aiofiles", path),
    "uring": lambda path: _open("uring", path),
    "striped": lambda path: Swapper.open([path, path / "b"], _SIZE, SwapperConfig(num_threads=2)),
    "memory": lambda path: Swapper.in_memory(_SIZE, SwapperConfig(num_threads=2)),
    "versions": lambda path: Versions.open(RunDirectory(path), [path], _SIZE, 2 * _SIZE, SwapperConfig(num_threads=2)),
}


@pytest.mark.parametrize("made", _MAKERS)
def test_threads_that_cannot_be_had_leave_nothing_behind(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    start = threading.Thread.start
    left = 0

    def start_few(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("swapper"):
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    before, files = set(threading.enumerate()), open_files(tmp_path)
    for allowed in range(100):
        left = allowed
        try:
            owner = _MAKERS[made](tmp_path)
        except BackendUnavailableError as reason:
            pytest.skip(str(reason))
        except LimitError as error:
            assert error.limit == "threads" and "ulimit -u" in str(error) and "num_threads" in str(error)
            assert set(threading.enumerate()) <= before
            if made != "versions":  # the run's lock is the caller's
                assert open_files(tmp_path) == files
        else:
            break
        gc.collect()  # else a frame of the error has that lock, from Python 3.13 on
    assert allowed > 1
    left = 100
    (owner.swapper if isinstance(owner, Versions) else owner).close()  # type: ignore[attr-defined]


def test_a_swapper_that_cannot_be_made_closes_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no table")

    monkeypatch.setattr("swapper.swapper.IntegrityBackend", fail)
    before, files = set(threading.enumerate()), open_files(tmp_path)
    config = SwapperConfig(verify_checksums=True)
    for make in (lambda: Swapper.open(tmp_path, _SIZE, config), lambda: Swapper.in_memory(_SIZE, config)):
        with pytest.raises(LimitError, match=r"memory is reached: no table; .*host_memory_budget") as raised:
            make()
        assert set(threading.enumerate()) <= before and open_files(tmp_path) == files
        del raised


def test_threads_start_all_or_none() -> None:
    over = threading.Event()
    begun = threading.Thread(target=over.wait)
    unstarted = threading.Thread(target=over.wait)
    unstarted.start = lambda: (_ for _ in ()).throw(RuntimeError("can't start new thread"))  # type: ignore[method-assign]
    with pytest.raises(LimitError):
        start_threads(begun, unstarted, stop=over.set)
    assert over.is_set() and not begun.is_alive()


def test_only_limits_become_limit_errors() -> None:
    for error in (RuntimeError("other"), OSError(errno.EIO, "x"), ValueError("x")):
        with pytest.raises(type(error)) as raised, limits_in_words():
            raise error
        assert raised.value is error
    for code, cure in ((errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "ulimit -v")):
        with pytest.raises(LimitError, match=cure) as told, limits_in_words():
            raise OSError(code, os.strerror(code))
        assert isinstance(told.value.__cause__, OSError)


def test_memory_that_cannot_be_mapped() -> None:
    with pytest.raises(LimitError, match=r"limit on memory .*cannot map") as raised:
        AlignedRegion(1 << 62)
    assert raised.value.limit == "memory"


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "uring"])
def test_few_open_files(backend: BackendName, tmp_path: Path) -> None:
    """However few there are, there is a swapper or an error with the cure, and then nothing is left open."""
    try:
        _open(backend, tmp_path).close()
    except BackendUnavailableError as reason:
        pytest.skip(str(reason))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
    taken: list[int] = []
    errors: list[str] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        while taken:
            try:
                swapper = _open(backend, tmp_path)
            except (LimitError, VolumeError, BackendUnavailableError) as error:
                errors.append(str(error))
            else:
                swapper.close()
                break
            os.close(taken.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert taken and errors and all("ulimit -n" in error for error in errors)
