"""`infinity clean`: what durable runs have left is told, and removed when that is wanted."""

from __future__ import annotations

import fcntl
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import main
from swapper.volumes.run_directory import LeftRun
from tests.killed import left_by_a_killed_save

clean_module = importlib.import_module("infinity.cli.clean")


def _config(*drives: Path) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": [str(drive) for drive in drives]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"durable": True},
    }


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A directory with a run of two steps, and a file of somebody else's."""
    with _started(tmp_path) as engine:
        for _ in range(2):
            _step(engine)
    (tmp_path / "durable" / "notes.txt").write_text("mine")
    return tmp_path


def _started(*drives: Path) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return infinity.initialize(model=model, config=_config(*drives))[0]


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()


def _told(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    assert main(["clean", str(path), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_told_and_removed(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(left, capsys)
    (run,) = told["runs"]
    assert run["path"] == str(left / "durable")
    assert run["num_bytes"] > 0 and run["num_commits"] == 1 and not run["is_in_use"]
    assert told["removed"] == []
    assert main(["clean", str(left)]) == 2  # nobody to ask
    assert "--yes" in capsys.readouterr().err
    assert len(_told(left, capsys)["runs"]) == 1
    assert main(["clean", str(left), "--yes"]) == 0
    assert "Removed 1 run, " in capsys.readouterr().out
    assert [path.name for path in (left / "durable").iterdir()] == ["notes.txt"]
    assert _told(left, capsys)["runs"] == []
    assert main(["clean", str(left)]) == 0
    assert "Nothing is left" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [-1e12, 1e15, 9e18])
def test_a_time_that_no_calendar_has(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LeftRun(tmp_path, num_bytes=1, num_commits=0, changed_at=seconds, is_in_use=True)
    monkeypatch.setattr(clean_module, "left_runs", lambda directory: [run])
    assert main(["clean", str(tmp_path)]) == 0


def test_files_of_others_stay_whatever_they_are_called(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = left / ".git" / "hooks"
    hooks.mkdir(parents=True)
    theirs = [
        hooks / "commit-msg.sample",
        hooks / "commit-0000000001",
        left / "states-list-of-matter",
        left / "states-1-of-50",
        left / "lock",
        left / "durable" / "states-1-of-50",
        left / ".tag.saving-0123456789abcdef" / ".lock",
    ]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(4096))
    assert [run["path"] for run in _told(left, capsys, "--yes")["runs"]] == [str(left / "durable")]
    assert _told(left, capsys)["runs"] == []
    assert [file for file in theirs if not file.exists()] == []


def test_what_is_in_use_stays_on_each_of_its_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drives = [tmp_path / "first", tmp_path / "second"]
    for drive in drives:
        drive.mkdir()
    with _started(*drives) as engine:
        _step(engine)
        told = _told(tmp_path, capsys, "--yes")
        assert [(run["path"], run["is_in_use"]) for run in told["runs"]] == [(str(d / "durable"), True) for d in drives]
        assert told["removed"] == []
        _step(engine)
    with _started(*drives) as engine:
        assert engine.global_steps == 2
    assert len(_told(tmp_path, capsys, "--yes")["removed"]) == 2
    assert [list(drive.iterdir()) for drive in drives] == [[], []]


def test_saves_below_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "part0-of-2"
    name, theirs = ".tag.saving-0123456789abcdef", tmp_path / ".notes.saving-mine"
    for path in (folder / name, folder / name.replace("0", "f")):
        left_by_a_killed_save(path)
    theirs.mkdir()
    (folder / name / "weights").write_bytes(bytes(10_000))
    living = folder / name.replace("0", "f") / ".lock"
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert _told(tmp_path, capsys)["saves"] == [str(folder / name)]
        assert main(["clean", str(tmp_path), str(folder), "--yes"]) == 0
        assert "Removed 1 killed save, 16,384 bytes." in capsys.readouterr().out
        assert living.exists() and theirs.exists() and not (folder / name).exists()
    assert _told(tmp_path, capsys, "--yes")["removed"] == [str(living.parent)]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_save_that_cannot_be_removed_is_a_failure(
    tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / ".tag.saving-0123456789abcdef"
    left_by_a_killed_save(save)
    monkeypatch.setattr(clean_module, "remove_abandoned", lambda parent: None)  # what it does where it has no rights
    assert main(["clean", str(tmp_path), "--yes", *more]) == 1
    assert capsys.readouterr().err == f"{save} cannot be removed: change its permissions, or remove it yourself.\n"
