"""What `doctor` and `checkpoint` say, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.checkpoint.saved import writing
from infinity.cli import doctor
from infinity.cli.main import main
from infinity.machine import findings
from infinity.machine.findings import Verdict

Captured = pytest.CaptureFixture[str]


def _json(arguments: list[str], capsys: Captured, status: int = 0) -> Any:
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------------- checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with two checkpoints of a weight and its state."""
    specs = [
        ArraySpec.of("parameters", "block.weight", kind, (300, 7), torch.float32) for kind in ("weight", "exp_avg")
    ]
    counters: dict[str, Any] = {"global_steps": 7, "micro_steps": 7, "skipped_steps": 0, "global_samples": 7}
    counters["loss_scale"] = {"dynamic": False, "scale": 1.0, "patience": 0, "num_finite": 0}
    rest = {"counters": counters, "client_state": {"epoch": 3}, "tied": {"head.weight": "block.weight"}}
    for tag in ("first", "second"):
        with writing(tmp_path / "saved", tag, specs, is_latest=True) as files:
            for spec in specs:
                files.open_array(spec).write(torch.arange(2100, dtype=torch.float32))
            files.write_training_state(rest)
    return tmp_path / "saved"


def test_a_checkpoint_is_told(saved: Path, capsys: Captured) -> None:
    facts = _json(["checkpoint", "inspect", str(saved), "--tensors"], capsys)
    assert Path(facts["folder"]).name == "second"
    assert facts["counters"]["global_steps"] == 7
    assert facts["num_parameters"] == 2100
    assert facts["kinds"]["exp_avg"] == {"num_tensors": 1, "num_bytes": 8400}
    assert (facts["client_state"], facts["other_tags"]) == (["epoch"], ["first"])
    assert {each["name"] for each in facts["tensors"]} == {"block.weight"}
    assert main(["checkpoint", "inspect", str(saved), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "300x7" in out and "head.weight = block.weight" in out


def test_damage_is_found(saved: Path, capsys: Captured) -> None:
    assert _json(["checkpoint", "verify", str(saved), "--all"], capsys)["is_whole"]
    data = max((path for path in (saved / "first").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    assert _json(["checkpoint", "verify", str(saved)], capsys)["is_whole"]
    found = _json(["checkpoint", "verify", str(saved), "--all"], capsys, status=1)
    problems = {Path(each["folder"]).name: each["problem"] for each in found["checkpoints"]}
    assert str(data) in problems["first"] and problems["second"] is None
    (saved / "second" / "manifest.json").unlink()  # as in a copy that was cut off
    found = _json(["checkpoint", "verify", str(saved), "--all"], capsys, status=1)
    assert ["manifest.json" in each["problem"] for each in found["checkpoints"]] == [False, True]
    assert main(["checkpoint", "verify", str(saved), "--tag", "first"]) == 1


# ----------------------------------------------------------------------------------------------------------------- doctor


def test_a_machine_is_told(tmp_path: Path, capsys: Captured) -> None:
    found = _json(["doctor", "--nvme-path", str(tmp_path), "--no-measure"], capsys)
    assert found["is_ready"] is True
    by_name = {finding["what"]: finding for finding in found["findings"]}
    assert "room for" in by_name["free space"]["text"] and "usable" in by_name["processors"]["text"]
    assert {"memory", "GPU", "O_DIRECT", "backend", "drive", "speed", "memory that may be locked"} <= set(by_name)
    assert list(tmp_path.iterdir()) == []


def test_what_prevents_a_training_is_an_exit_status(tmp_path: Path, capsys: Captured) -> None:
    wrong = tmp_path / "not" / "there"
    found = _json(["doctor", "--nvme-path", str(wrong), "--no-measure"], capsys, status=1)
    bad = [finding for finding in found["findings"] if finding["verdict"] == "bad"]
    assert len(bad) == 1 and str(wrong) in bad[0]["text"] and bad[0]["cure"]
    assert main(["doctor", "--nvme-path", str(wrong), "--no-measure"]) == 1
    assert "cannot train" in capsys.readouterr().out


def test_directories_of_a_config(tmp_path: Path, capsys: Captured) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    (tmp_path / "c.json").write_text(
        json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    )
    found = _json(["doctor", "--config", str(tmp_path / "c.json"), "--no-measure"], capsys)
    assert {finding["directory"] for finding in found["findings"]} == {"", str(tmp_path)}


def test_a_group_without_memory_prevents_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "free_bytes", lambda: 100_000_000)
    memory = next(finding for finding in findings.computing_findings() if finding.what == "memory")
    assert memory.verdict is Verdict.BAD and memory.cure


def test_a_gpu_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(*_: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nand much more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", taken)
    gpu = findings._gpu()
    assert gpu.verdict is Verdict.BAD and gpu.cure and "are busy" in gpu.text and "\n" not in gpu.text
    plan = ["plan", "--params", "1m", "--no-measure", "--nvme-path", str(tmp_path)]
    assert main(plan) == 1
    assert "the GPU cannot be used: CUDA error: all CUDA-capable devices are busy." in capsys.readouterr().err
    if torch.version.cuda is None:  # else torch's optimizers ask the driver, because a GPU was promised above
        assert main([*plan, "--ram", "8GB"]) == 0


def test_two_directories_on_one_drive(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    found = list(findings.storage_findings(paths, measures=False))
    assert found[-1].verdict is Verdict.POOR and "one drive" in found[-1].text


def test_a_directory_that_initialize_makes_prevents_no_training(tmp_path: Path) -> None:
    found = list(findings.storage_findings([tmp_path / "new"], measures=False))
    assert found[0].verdict is Verdict.POOR and "infinity.initialize makes it" in found[0].text
    assert len(found) > 1 and not (tmp_path / "new").exists()
    (nowhere,) = findings.storage_findings([tmp_path / "no" / "where"], measures=False)
    assert nowhere.verdict is Verdict.BAD


def test_the_doctor_prints_brackets_as_they_are(capsys: Captured) -> None:
    found = findings.note("drive", "an [hf] and a [1]", "try [bold]", "/mnt/[1]")
    doctor._print([found], is_ready=True)
    shown = capsys.readouterr().out
    assert "an [hf] and a [1]" in shown and "try [bold]" in shown and "/mnt/[1]" in shown and "\\" not in shown
