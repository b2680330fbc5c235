"""The programs that users start, as they start them: in a process of their own."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.metrics import read_run
from tests.children import run_python

_ROOT = Path(__file__).resolve().parents[2]
_PNG = b"\x89PNG"


def start(
    directory: Path, script: str, *options: str | Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a tool in `directory`, which is on a drive and empty."""
    return subprocess.Popen(
        [sys.executable, str(_ROOT / "tools" / script), *map(str, options)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "160", "PYTHONPATH": str(_ROOT)} | (environment or {}),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything printed."""
    try:
        output, _ = process.communicate(timeout=560)
    finally:
        process.kill()
    return process.returncode, output


def first_and_last_loss(output: str) -> tuple[float, float]:
    """Read from the table."""
    found = re.search(r"loss, mean .*? ([0-9.]+) +-> +([0-9.]+)", output)
    assert found is not None, output
    return float(found.group(1)), float(found.group(2))


@pytest.mark.deep
def test_train_learns_prints_and_draws(nvme_dir: Path) -> None:
    code, output = finish(start(nvme_dir, "train.py", "--model", "tiny", "--steps", "30", "--run-log", "log"))
    assert code == 0, output
    first, last = first_and_last_loss(output)
    assert last < first - 0.5
    for row in ("of them on NVMe", "host memory budget", "peak of its buffers", "waiting for reads", "optimizer"):
        assert row in output
    assert (nvme_dir / "train.png").read_bytes().startswith(_PNG)
    assert sorted(path.name for path in nvme_dir.iterdir()) == ["log", "train.png"]
    assert len(read_run(nvme_dir / "log").steps) == 30


@pytest.mark.deep
def test_train_prints_what_it_has_on_interrupt(nvme_dir: Path) -> None:
    process = start(nvme_dir, "train.py", "--model", "tiny", "--steps", "10")
    try:
        for line in process.stdout:
            if line.startswith("step 1/10"):
                break
        process.send_signal(signal.SIGINT)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    code, output = finish(process)
    assert code == 130, output
    assert "loss, mean" in output
    assert "interrupted" in output


@pytest.mark.deep
def test_bench_step_measures_a_small_model_and_leaves_nothing(nvme_dir: Path) -> None:
    options = ["--model", "tiny", "--throttle", "none", "--turns", "1", "--steps-per-turn", "2", "--budget", "5.2MB"]
    options += [
        "--set",
        "main_weights=fp32",
    ]  # with remainders the model weights are rounded otherwise than in plain torch
    code, output = finish(start(nvme_dir, "bench_step.py", *options, "--timeline", "trace.json"))
    assert code == 0, output
    assert sorted(path.name for path in nvme_dir.iterdir()) == ["bench_step.json", "trace.json"]
    assert len(json.loads((nvme_dir / "trace.json").read_text())["traceEvents"]) > 100
    assert re.search(r"compute \d+ %, drive \d+ %", output), output
    result = json.loads((nvme_dir / "bench_step.json").read_text())
    (case,) = result["cases"]
    ours, alone = case["outcomes"]
    assert (ours["name"], alone["name"]) == ("ours", "in_memory")
    assert ours["error"] is None
    assert ours["read_bytes_per_step"] > 0
    assert 0 < ours["busy_shares"]["drive_busy_share"] <= 1
    losses = [turn["losses"] for turn in ours["turns"]]
    assert losses == [turn["losses"] for turn in alone["turns"]], "same numbers as in memory"


@pytest.mark.deep
@pytest.mark.parametrize("limit", ["2000000000", "100000000"])
def test_larger_than_ram_compares_a_whole_life(limit: str, nvme_dir: Path) -> None:
    # Without layers: what is left is small. With the second limit, Python alone is too large.
    options = ["--larger-than-ram", "--layers", "0", "--seq-len", "8", "--limit", limit]
    code, output = finish(start(nvme_dir, "kill_and_resume.py", *options))
    if limit == "2000000000":
        assert code == 0, output
        assert "killed with -9 in the middle of a step" in output
        assert "All equal." in output
        assert "DIFFERENT" not in output
    elif "No memory limit" not in output:
        assert code != 0, output
    assert not list((nvme_dir / "nvme").iterdir())


@pytest.mark.deep
def test_a_killed_training_comes_to_the_same_bits(nvme_dir: Path) -> None:
    code, output = finish(start(nvme_dir, "kill_and_resume.py", "--model", "tiny", "--seq-len", "8"))
    assert code == 0, output
    assert "killed with -9 in the middle of a step" in output
    for compared in ("train, resume: step 5: loss", "train, resume: sha256", "resume, load: sha256"):
        assert re.search(rf"{compared}.* equal", output), output
    assert "DIFFERENT" not in output
    assert not list(nvme_dir.iterdir())


@pytest.mark.deep
def test_a_day_with_a_gpu_runs_to_its_end_on_the_simulated_one(nvme_dir: Path) -> None:
    slots = ["same-bits", "synchronisations"]
    command = ["bash", str(_ROOT / "tools/gpu_day.sh"), "--simulated", "--out", str(nvme_dir / "day"), *slots]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=560, env=os.environ | {"PYTHON": sys.executable}, check=False
    )
    if "NoSimulation" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    report = (nvme_dir / "day/report.md").read_text()
    for slot in slots:
        assert f"## {slot}: passed" in report
    assert "BROKEN" not in report
    # What a step waits for in the thread that trains: the loss of the report, and gradients that it needs.
    assert re.search(r"synchronize in MainThread", report)


@pytest.mark.deep
def test_participants_beside_a_gpu_answer_one_by_one_and_who_is_missing_is_said(nvme_dir: Path) -> None:
    out = nvme_dir / "answers.jsonl"
    options = ["--drives", str(nvme_dir), "--out", str(out), "--set", "tiny", "--peer-packages", str(nvme_dir / "none")]
    done = run_python("tools/gpu_peer.py", *options)
    plain, ours, deepspeed = map(json.loads, out.read_text().splitlines())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no wheels and no ds_site.zip" in deepspeed["error"] and "--peer-python" in deepspeed["error"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert ours["read_bytes_per_step"] > 0 == plain["read_bytes_per_step"]
    assert len(ours["seconds"]) == 3 and ours["high_water_bytes"] > 0
    assert [each.name for each in nvme_dir.iterdir()] == ["answers.jsonl"]


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "a.py").write_text(
        '"""Docs\nof two lines."""\n\nx = 1  # a comment\n"""What x is."""\n# a comment\n\n\n'
        'def f() -> str:\n    """Docs."""\n    return """not\n    docs"""\n'
    )
    monkeypatch.setattr(sys, "argv", ["count_lines.py", str(tmp_path), "--depth", "99"])
    runpy.run_path(str(_ROOT / "tools/count_lines.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["4", "all"]
    assert "median 3 lines" in lines[3]


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Reads on until a line holds `words`. Returns what was read."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} never came: {''.join(lines)}")


def start_profile(directory: Path, *options: str) -> subprocess.Popen[str]:
    return start(directory, "../infinity/__main__.py", "profile", str(directory), *options)


@pytest.mark.deep
def test_an_interruption_gives_what_was_measured(nvme_dir: Path) -> None:
    process = start_profile(nvme_dir)
    wait_for(process, "round 2 of")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert "Not finished: interrupted" in output and "mixed, GB/s" in output
    assert "Settings for the config" not in output, "half a measurement gives no advice"
    assert list(nvme_dir.iterdir()) == []
