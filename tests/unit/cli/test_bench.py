"""``infinity bench``: what it refuses before it measures anything, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.cli.main import main

_MISUSED = 2


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (["--micro-batches", "1,many"], "such as 1,3"),
        (["--micro-batches", "0"], "such as 1,3"),
        (["--clip", "-1"], "such as 0,1"),
        (["--checkpointing", "some"], "none,reentrant,non-reentrant"),
        (["--budget", "12 parsecs"], "such as 384MB,2GB"),
        (["--throttle", "fast"], "such as 300,600,none"),
        (["--throttle", "none", "--timeline", "missing/trace.json"], "create it first"),
        (["--throttle", "none", "--json", "missing/step.json"], "create it first"),
        (["--throttle", "none", "--peer", "deepspeed", "--peer-python", "no-such-python"], "name the Python"),
    ],
    ids=str,
)
def test_what_cannot_be_measured(
    options: list[str], cure: str, nvme_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nvme_dir)
    assert main(["bench", "step", *options]) == _MISUSED
    told = capsys.readouterr().err
    assert cure in told
    assert len(told.splitlines()) == 1
    assert list(nvme_dir.iterdir()) == []


@pytest.mark.parametrize("options", [["--throttle", "600"], ["--throttle", "none", "--memory-limit", "1GB"]], ids=str)
def test_limits_without_control_groups(
    options: list[str], nvme_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.bench.program.why_unavailable", lambda _: "control groups need root")
    assert main(["bench", "step", "--nvme-path", str(nvme_dir), "--json", *options]) == _MISUSED
    assert f"{options[-2]} cannot be used: control groups need root; " in capsys.readouterr().err


def test_a_file_system_without_a_drive(
    small_tmpfs: Callable[[int], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(small_tmpfs(1 << 20))
    assert main(["bench", "step", "--nvme-path", path, "--json", str(tmp_path / "step.json")]) == _MISUSED
    assert "name a directory on a drive" in capsys.readouterr().err


def test_updates_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "update", "--workers", "1", "--parameters", "4e6", "--turns", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 4 << 20
    assert [row["name"] for row in found["rows"]] == ["1 workers", "copies by 1", "norms", "torch's fused AdamW"]
    assert found["rows"][0]["against_first"] == 1.0
