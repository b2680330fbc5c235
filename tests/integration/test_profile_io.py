"""`tools/profile_io.py` as a user starts it: what it prints and writes, and what is left when it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = ["--size", "96MiB", "--request-sizes", "1MiB,4MiB", "--in-flight", "4,8", "--seconds", "0.02"]
_SHORTEST = [*_SHORT, "--repetitions", "1", "--backends", "threads"]
_has_fio = shutil.which("fio") is not None


def start(*options: str | Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts the tool."""
    return subprocess.Popen(
        [sys.executable, str(_ROOT / "tools" / "profile_io.py"), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_ROOT)} | (environment or {}),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything printed."""
    try:
        output, _ = process.communicate(timeout=560)
    finally:
        process.kill()
    return process.returncode, output


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Reads on until a line holds `words`. Returns what was read."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} never came: {''.join(lines)}")


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A directory for what is written, apart from the one that is measured."""
    path = tmp_path / "outputs"
    path.mkdir()
    return path


@pytest.mark.deep
def test_a_whole_run(nvme_dir: Path, outputs: Path) -> None:
    config = outputs / "config.json"
    config.write_bytes((_ROOT / "configs" / "zero3_nvme.json").read_bytes())
    options = ["--quick", "--repetitions", "2", "--json", outputs / "io.json", "--png", outputs / "io.png"]
    code, output = finish(
        start(
            nvme_dir,
            *_SHORT,
            *options,
            "--apply",
            config,
            "--model",
            "374M",
            "--tbw",
            "600",
            "--tokens-per-second",
            "99",
        )
    )
    assert code == 0, output
    assert list(nvme_dir.iterdir()) == []
    assert max(map(len, output.split("Settings for the config")[0].split("What the drive does")[1].splitlines())) <= 100

    result: dict[str, Any] = json.loads((outputs / "io.json").read_text())
    assert result["partial"] is False
    assert "threads" in result["verified"]
    settings = {json.dumps(each["setting"]) for each in result["ours"]}
    backends = [name for name, state in result["backends"].items() if state == "available"]
    assert {json.loads(each)["backend"] for each in settings} == set(backends)
    for each in result["ours"]:
        assert len(each["samples"]) == 2 or "rounds of the sweep, to keep it short" in output
        assert each["least"] <= each["median"] <= each["most"]
    assert result["cores_at_2_gb_per_second"]["threads"]["read"] > 0
    assert (outputs / "io.png").read_bytes().startswith(b"\x89PNG")

    if _has_fio:
        for workload in ("read", "write", "mixed"):
            share = result["share_of_fio"][workload]
            low, high, level = result["share_of_fio_interval"][workload]
            assert low <= share <= high
            assert level > 0.95
            assert len(result["comparison"][workload]["pairs"]) == 7
        assert all(each["share_of_fio"] for each in result["ours"])
        assert "7 pairs" in output
    else:
        assert result["share_of_fio"] == {"read": None, "write": None, "mixed": None}

    # The printed block, the block in the JSON, and the file that was changed say the same.
    printed = json.loads(output[output.index("\n{\n") : output.index("\n}\n") + 2])
    assert printed == result["config"]
    assert set(result["reasons"]) == {f"{block}.{key}" for block in printed for key in printed[block]}
    measured = {
        (e["setting"]["backend"], e["setting"]["request_bytes"], e["setting"]["max_inflight"]) for e in result["ours"]
    }
    io = infinity.load_config(config, check_storage=False).io
    assert (io.backend, io.request_bytes, io.max_inflight) in measured
    assert (
        json.loads(config.read_text())["optimizer"]
        == json.loads((_ROOT / "configs/zero3_nvme.json").read_text())["optimizer"]
    )

    training = result["training"]
    moved = training["step_bytes"]["read"] + training["step_bytes"]["write"]
    assert training["io_seconds_per_step"] == pytest.approx(moved / training["bytes_per_second"])
    assert training["tokens_per_step_that_hide_io"] == pytest.approx(99 * training["io_seconds_per_step"])
    assert training["life_steps"] == pytest.approx(600e12 / training["step_bytes"]["write"])
    assert "Training 374M parameters" in output


@pytest.mark.deep
def test_an_interruption_gives_what_was_measured(nvme_dir: Path, outputs: Path) -> None:
    options = [
        "--json",
        outputs / "io.json",
        "--apply",
        outputs / "config.json",
        "--seconds",
        "0.1",
        "--repetitions",
        "999",
    ]
    (outputs / "config.json").write_text('{"train_batch_size": 1}')
    process = start(nvme_dir, *_SHORT, "--backends", "threads", "--no-fio", *options)
    wait_for(process, "sweep, round 2 of 999")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # impatience changes nothing
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert "Not finished: interrupted" in output
    assert "fio is not installed" not in output, "nobody asked for it"
    assert "What the drive does" in output
    result = json.loads((outputs / "io.json").read_text())
    assert result["partial"] is True
    assert result["ours"]
    assert (outputs / "config.json").read_text() == '{"train_batch_size": 1}', "half a measurement changes no config"
    assert list(nvme_dir.iterdir()) == []
    assert sorted(path.name for path in outputs.iterdir()) == ["config.json", "io.json"]


@pytest.mark.deep
def test_an_interruption_before_anything_was_measured(nvme_dir: Path) -> None:
    process = start(nvme_dir, "--no-fio")
    wait_for(process, "This takes about")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code in (130, -signal.SIGINT), output
    assert "Traceback" not in output
    assert list(nvme_dir.iterdir()) == []


def free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


@pytest.mark.deep
def test_kill_leaves_nothing(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(200 << 20)
    before = free_bytes(directory)
    process = start(directory, *_SHORT, "--repetitions", "999")
    wait_for(process, "sweep, round 1")
    assert free_bytes(directory) < before - (90 << 20)
    process.kill()
    finish(process)
    wait_until(lambda: free_bytes(directory) == before)  # a run of fio that goes on ends by itself
    assert list(directory.iterdir()) == []


@pytest.mark.deep
def test_bad_input_is_refused_in_words(nvme_dir: Path) -> None:
    code, output = finish(start(nvme_dir / "missing"))
    assert code == 2, output
    assert "--help" in output
    assert "Traceback" not in output


@pytest.mark.deep
def test_results_are_alone_on_stdout_and_a_terminal_sees_the_time_left(nvme_dir: Path, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty", reason="needs a pseudo terminal")
    leader, follower = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PATH": str(tmp_path), **terminal}
    with (tmp_path / "stdout").open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, str(_ROOT / "tools" / "profile_io.py"), str(nvme_dir), *_SHORTEST, "--json"],
            stdin=follower,
            stdout=stdout,
            stderr=follower,
            env=environment,
        )
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while chunk := os.read(leader, 65536):
            seen += chunk
    os.close(leader)
    assert process.wait(timeout=560) == 0
    text = seen.decode(errors="replace")
    assert re.search(r"\d+ s left", text)
    assert "sweep, round 1" in text
    assert "fio is not installed" in text
    assert "Settings for the config" in text
    assert json.loads((tmp_path / "stdout").read_text())["partial"] is False


@pytest.mark.deep
def test_a_python_without_the_packages_is_told_the_cure(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('none here', name='numpy')\n")
    code, output = finish(start(tmp_path, environment={"PYTHONPATH": str(tmp_path)}))
    assert code == 2
    assert "no module" in output and "-m pip install -e" in output, output
