"""`tools/profile_io.py` as a user starts it: what it prints and writes, and what is left when it is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = ["--size", "96MiB", "--seconds", "0.02", "--backends", "threads"]
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
    options = ["--size", "160MiB", "--seconds", "0.02", "--rounds", "2", "--pairs", "3"]
    files = ["--json", outputs / "io.json", "--png", outputs / "io.png", "--apply", config]
    cache = {"INFINITY_CACHE_DIR": str(outputs / "cache")}
    code, output = finish(start(nvme_dir, *options, *files, environment=cache))
    assert code == 0, output
    assert list(nvme_dir.iterdir()) == []

    result: dict[str, Any] = json.loads((outputs / "io.json").read_text())
    assert result["partial"] is False
    assert "threads" in result["verified"]
    for each in result["samples"]:
        assert len(each["rates"]) == 2 and min(each["rates"]) <= each["median"] <= max(each["rates"])
    assert (outputs / "io.png").read_bytes().startswith(b"\x89PNG")
    if _has_fio:
        for workload in ("read", "write", "mixed"):
            low, high, level = result["share_of_fio"][workload]["interval"]
            assert low <= result["share_of_fio"][workload]["share"] <= high and level == 0.75
    else:
        assert "share_of_fio" not in result and "fio is not installed" in output

    # The printed block, the block in the JSON, and the file that was changed say the same.
    printed = json.loads(output[output.index("\n{\n") : output.index("\n}\n") + 2])
    assert printed == result["config"]
    measured = [each["setting"] for each in result["samples"]]
    io = infinity.load_config(config, check_storage=False).io
    found = {"backend": io.backend, "request_bytes": io.request_bytes, "num_threads": io.num_threads}
    assert {**found, "max_inflight": io.max_inflight} in measured
    before = json.loads((_ROOT / "configs/zero3_nvme.json").read_text())
    assert json.loads(config.read_text())["optimizer"] == before["optimizer"]
    assert (outputs / "cache" / "io.json").is_file(), "plans know the drive's speed"


@pytest.mark.deep
def test_an_interruption_gives_what_was_measured(nvme_dir: Path, outputs: Path) -> None:
    options = ["--json", outputs / "io.json", "--apply", outputs / "config.json", "--rounds", "9999"]
    (outputs / "config.json").write_text('{"train_batch_size": 1}')
    process = start(nvme_dir, *_SHORT, "--no-fio", *options)
    wait_for(process, "round 2 of 9999")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert "Not finished: interrupted" in output
    result = json.loads((outputs / "io.json").read_text())
    assert result["partial"] is True
    assert result["samples"]
    assert (outputs / "config.json").read_text() == '{"train_batch_size": 1}', "half a measurement changes no config"
    assert list(nvme_dir.iterdir()) == []
    assert sorted(path.name for path in outputs.iterdir()) == ["config.json", "io.json"]


def free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


@pytest.mark.deep
def test_kill_leaves_nothing(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(200 << 20)
    before = free_bytes(directory)
    process = start(directory, *_SHORT, "--rounds", "9999")
    wait_for(process, "round 1")
    assert free_bytes(directory) < before - (90 << 20)
    process.kill()
    finish(process)
    wait_until(lambda: free_bytes(directory) == before)  # a run of fio that goes on ends by itself
    assert list(directory.iterdir()) == []
