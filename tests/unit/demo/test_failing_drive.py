"""The demo whose drive fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import train

from tests.exactness.faulty_drives import faulty_drives
from tests.faults import FaultInjectingBackend, FaultRule


class _Watched(list[Any]):
    def __init__(self, backends: list[FaultInjectingBackend]) -> None:
        self._backends = backends

    def append(self, report: Any) -> None:
        super().append(report)
        for backend in self._backends:
            backend.add(FaultRule(errno=errno.EIO))


def test_train_prints_what_it_has_when_a_drive_fails(
    nvme_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nvme_dir)
    with faulty_drives() as backends:

        class Failing(train.History):
            """All drives fail as soon as a step has ended."""

            def __init__(self, tokens_per_step: int) -> None:
                super().__init__(tokens_per_step, _Watched(backends))

        monkeypatch.setattr(train, "History", Failing)
        arguments = ["--model", "tiny", "--steps", "4", "--host-memory-budget", "3MB"]
        assert train.main(arguments) == 1
    captured = capsys.readouterr()
    told = captured.out.replace("\n", " ")
    assert "loss, mean" in told and "Ended after 1 of 4 steps" in told and "EIO" in told and "Traceback" not in told
