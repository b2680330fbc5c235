"""fio's answers and how it is run; fio itself is played here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import fio
import pytest


@pytest.fixture
def played_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes a `fio` out of the given Python source."""

    def make(source: str) -> None:
        program = tmp_path / "fio"
        program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{source}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def answer(read: float = 1e9, write: float = 0.0, error: int = 0) -> str:
    """Source of a program that prints what fio would, with a warning in front as fio does."""
    direction = "{'bw_bytes': %r, 'io_bytes': int(%r)}"
    return (
        "print('note: both iodepth >= 1 and synchronous I/O engine are selected')\n"
        f"print(json.dumps({{'jobs': [{{'error': {error}, 'read': {direction % (read, read)}, "
        f"'write': {direction % (write, write)}}}]}}))"
    )


def test_fio_is_read(played_fio: Callable[[str], None]) -> None:
    played_fio(answer(2e9, 1e9))
    (job,) = fio.run("--name=x")
    assert (job["read"]["bw_bytes"], job["write"]["bw_bytes"]) == (2e9, 1e9)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('fio: engine libaio not loadable', file=sys.stderr); sys.exit(1)", "engine libaio not loadable"),
        (answer(error=1), "Operation not permitted"),
        ("print('no JSON')", "cannot be read"),
        ("sys.exit(7)", "exit code 7"),
    ],
)
def test_what_fio_cannot_do_is_said_in_its_words(played_fio: Callable[[str], None], source: str, words: str) -> None:
    played_fio(source)
    with pytest.raises(fio.FioFailed, match=words):
        fio.run("--name=x")
