"""The demo whose drive fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import train

from tests.exactness.faulty_drives import faulty_drives
from tests.faults import FaultRule


def test_train_prints_what_it_has_when_a_drive_fails(
    nvme_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nvme_dir)
    with faulty_drives() as backends:

        def advance(bar: train.Progress, task: Any) -> None:
            """All drives fail as soon as a step has ended."""
            for backend in backends:
                backend.add(FaultRule(errno=errno.EIO))

        monkeypatch.setattr(train.Progress, "advance", advance)
        arguments = ["--model", "tiny", "--steps", "4", "--host-memory-budget", "3MB"]
        assert train.main(arguments) == 1
    captured = capsys.readouterr()
    told = captured.out.replace("\n", " ")
    assert (
        "tokens per second" in told and "Ended after 1 of 4 steps" in told and "EIO" in told and "Traceback" not in told
    )
