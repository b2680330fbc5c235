"""fio's answers and how it is run; fio itself is played here."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.io_profile.fio import Fio, FioFailed, FioJob, job_at
from infinity.io_profile.grid import Point
from swapper.measure.io_setting import Workload

_MIB = 1 << 20


@pytest.fixture
def played_fio(tmp_path: Path) -> Callable[[str], Fio]:
    """A function that makes a `fio` out of the given Python source, on one file of 64 MiB."""
    file = tmp_path / "file"
    with file.open("wb") as handle:
        handle.truncate(64 * _MIB)

    def make(source: str) -> Fio:
        program = tmp_path / "fio"
        program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{source}\n")
        program.chmod(0o755)
        return Fio(str(program), [str(file)], is_direct=True)

    return make


def answer(read: float = 1e9, write: float = 0.0, error: int = 0) -> str:
    """Source of a program that prints what fio would, with a warning in front as fio does."""
    direction = "{'bw_bytes': %r, 'io_bytes': int(%r)}"
    return (
        "print('note: both iodepth >= 1 and synchronous I/O engine are selected')\n"
        f"print(json.dumps({{'jobs': [{{'error': {error}, 'usr_cpu': 5.0, 'sys_cpu': 15.0, "
        f"'read': {direction % (read, read)}, 'write': {direction % (write, write)}}}]}}))"
    )


def test_fio_is_read(played_fio: Callable[[str], Fio]) -> None:
    found = played_fio(answer(2e9, 1e9)).measure(FioJob("libaio", _MIB, 1, 8), Workload.MIXED, 0.1)
    assert found.bytes_per_second == 3e9
    assert found.written_bytes == 10**9
    assert found.cpu_cores == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('fio: engine libaio not loadable', file=sys.stderr); sys.exit(1)", "engine libaio not loadable"),
        (answer(error=1), "Operation not permitted"),
        ("print('no JSON')", "cannot be read"),
        ("sys.exit(7)", "exit code 7"),
    ],
)
def test_what_fio_cannot_do_is_said_in_its_words(played_fio: Callable[[str], Fio], source: str, words: str) -> None:
    with pytest.raises(FioFailed, match=words):
        played_fio(source).measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)


def test_a_fio_that_hangs_is_ended(played_fio: Callable[[str], Fio], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.io_profile.fio._PATIENCE_SECONDS", 0.1)
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(FioFailed, match="no answer"):
        played_fio("time.sleep(1000)").measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_fio_goes_on_where_it_ended(played_fio: Callable[[str], Fio], tmp_path: Path) -> None:
    fio = played_fio(
        f"open({str(tmp_path / 'seen')!r}, 'a').write([a for a in sys.argv if a.startswith('--offset=')][0] + ' ')\n"
        + answer(read=20 * _MIB)
    )
    for _ in range(3):
        fio.measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)
    # The third run would have less than half of the file left.
    assert (tmp_path / "seen").read_text().split() == ["--offset=0", f"--offset={20 * _MIB}", "--offset=0"]


@pytest.mark.parametrize(
    ("engine", "depth", "num_files", "num_cores", "num_jobs"),
    [
        ("libaio", 32, 1, 2, 1),
        ("libaio", 32, 2, 2, 2),
        ("io_uring", 32, 4, 2, 1),
        ("psync", 32, 1, 2, 2),
        ("psync", 4, 1, 16, 4),
        ("psync", 8, 3, 7, 6),
    ],
)
def test_fio_has_no_more_jobs_than_cores(
    engine: str, depth: int, num_files: int, num_cores: int, num_jobs: int
) -> None:
    job = job_at(engine, Point(_MIB, depth), num_files=num_files, num_cores=num_cores)
    assert job.num_jobs == num_jobs <= num_cores
    assert job.point == Point(_MIB, depth)
