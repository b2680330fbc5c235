"""``infinity profile``: what it refuses before it measures anything, and what it says of drives that fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from infinity.machine import drive_profile
from infinity.machine.drive_profile import QUICK


def test_too_little_space(small_tmpfs: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    directory = small_tmpfs(40 << 20)
    assert main(["profile", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "free some space" in out and "files there are in memory" in out


@pytest.mark.deep
def test_results_are_alone_on_stdout(
    nvme_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(QUICK, file_bytes=96 << 20, sample_seconds=0.01, num_rounds=1)
    monkeypatch.setattr(drive_profile, "QUICK", short)
    assert main(["profile", str(nvme_dir), "--quick", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["partial"] is False and set(found["alone"]) == {"read", "write"}
    assert "Settings for the config" in captured.err
    assert list(nvme_dir.iterdir()) == []


class _Interrupted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_in_a_finalizer_is_raised_at_the_next_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(*arguments: Any) -> None:
        progress = arguments[-1]
        progress("one", 0.1)
        _Interrupted()
        progress("two", 0.2)
        pytest.fail("the interrupt was lost")

    monkeypatch.setattr(drive_profile, "sweep", sweep)
    before = signal.getsignal(signal.SIGINT)
    assert main(["profile", str(tmp_path), "--quick"]) == 130
    assert "Not finished: interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before
