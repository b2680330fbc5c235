"""``infinity profile``: what it refuses before it measures anything, and what it says of drives that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from swapper.measure.measurement import DriveTest


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
def test_a_drive_that_gives_back_other_bytes_is_reported(
    small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = DriveTest.prepare

    def spoiled(self: DriveTest, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        with open(self.paths[0], "r+b") as file:
            file.seek(5 << 20)
            file.write(b"other bytes")

    monkeypatch.setattr(DriveTest, "prepare", spoiled)
    directory = small_tmpfs(200 << 20)
    assert main(["profile", str(directory), "--size", "96MiB", "--seconds", "0.02", "--backends", "threads"]) == 1
    out = capsys.readouterr().out.replace("\n", "")
    assert "WrongDataError" in out and str(directory) in out
    assert str(5 << 20) in out, "the place is named"


@pytest.mark.deep
def test_a_profile_that_nobody_reads_ends_as_every_command_does(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "infinity", "profile", str(tmp_path), "--quick"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    assert ended.returncode == 141, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.deep
def test_results_are_alone_on_stdout(nvme_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--size", "96MiB", "--seconds", "0.01", "--rounds", "1", "--backends", "threads"]
    assert main(["profile", str(nvme_dir), *short, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["partial"] is False and found["verified"] == ["threads"]
    assert "Settings for the config" in captured.err
    assert list(nvme_dir.iterdir()) == []
