"""``infinity profile``: what it refuses before it measures anything, and what it says of drives that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.cli.main import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "0"], "more than 0"),
        (["--size", "many"], "must be a size"),
        (["--seconds", "0"], "is not in the range"),
        (["--seconds", "1e9"], "is not in the range"),
        (["--rounds", "0"], "is not in the range"),
        (["--backends", "magic"], "is not one of"),
        (["--json", "/nowhere/at/all.json"], "is no directory"),
        (["--apply", "/nowhere.json"], "no such file"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_words(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path), *options]) == 2
    told = capsys.readouterr().err
    assert words in told and options[0].removeprefix("--apply") in told


def test_too_little_space(small_tmpfs: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    directory = small_tmpfs(40 << 20)
    assert main(["profile", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "free some space" in out and "files there are in memory" in out


@pytest.mark.deep
def test_results_are_alone_on_stdout(nvme_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--size", "96MiB", "--seconds", "0.01", "--rounds", "1", "--backends", "threads"]
    assert main(["profile", str(nvme_dir), *short, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["partial"] is False and found["verified"] == ["threads"]
    assert "Settings for the config" in captured.err
    assert list(nvme_dir.iterdir()) == []
