"""What users send of their machines names nobody and no place."""

from __future__ import annotations

import json
from pathlib import Path

import machine_report
import pytest

_PROFILE = {
    "machine": {
        "processor": "AMD EPYC",
        "num_cores": 2,
        "directory": "/home/ada/nvme",
        "drive": "nvme0n1 (ext4) Example SSD",
        "torch": "2.13.0",
    },
    "stopped_by": "TransferError: /home/ada/nvme/scratch: no answer",
    "directories": ["/home/ada/nvme"],
    "unusable": {"uring": "ada's kernel refuses it"},
    "samples": [{"setting": {"block_bytes": 1048576, "backend": "threads"}, "rates": [1e9, 2e9]}],
    "/home/ada/nvme": 3,
}
_BENCH = {
    "command": [
        *("/home/ada/bench_step.py", "--nvme-path", "/home/ada", "--throttle", "300,none", "--budget", "1.5GB"),
        *("--peer-python", "ada"),
    ],
    "cases": [{"label": "1 x 256", "outcomes": [{"name": "ours", "error": "in /home/ada", "seconds_per_step": [1.5]}]}],
}


def test_numbers_and_hardware_stay_and_names_and_paths_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("profile.json", _PROFILE), ("bench.json", _BENCH)):
        (tmp_path / name).write_text(json.dumps(content))
    assert machine_report.main([str(tmp_path / "profile.json"), str(tmp_path / "bench.json")]) == 0
    printed = capsys.readouterr().out
    assert "ada" not in printed and "/" not in printed.replace("\\/", "/")
    profile, bench = json.loads(printed)["reports"]
    assert profile == {
        "machine": {"processor": "AMD EPYC", "num_cores": 2, "drive": "nvme0n1 (ext4) Example SSD", "torch": "2.13.0"},
        "directories": [],
        "unusable": {},
        "samples": [{"setting": {"block_bytes": 1048576, "backend": "threads"}, "rates": [1e9, 2e9]}],
    }
    assert bench == {
        "command": ["--nvme-path", "--throttle", "300,none", "--budget", "1.5GB", "--peer-python"],
        "cases": [{"label": "1 x 256", "outcomes": [{"name": "ours", "seconds_per_step": [1.5]}]}],
    }


def test_a_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine_report.main([str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err
