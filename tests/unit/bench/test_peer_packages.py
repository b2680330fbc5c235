"""Wheels of a peer, unpacked beside each other; and tables without rows."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import bench_experts
import gpu_peer
import pytest


def _wheel(folder: Path, name: str, *files: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for file in files:
            archive.writestr(file, f"NAME = {name!r}\n")


def test_packages_are_found_wherever_a_wheel_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(tmp_path, "a", "a/__init__.py")
    _wheel(tmp_path, "b", "b-1.data/purelib/b/__init__.py", "b-1.data/scripts/b")
    _wheel(tmp_path, "c", "c-1.data/platlib/c/__init__.py")

    def missing(spec: dict[str, str]) -> str:
        site = Path(spec["path"].partition(":")[0])
        return "".join(name for name in "abcd" if not (site / name / "__init__.py").exists())

    monkeypatch.setattr(gpu_peer, "_missing", missing)
    with gpu_peer._deepspeed_place(argparse.Namespace(peer_python=None, peer_packages=tmp_path)) as (_, problem):
        assert problem.startswith("DeepSpeed: d; put its wheels")


def test_a_file_that_is_no_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.whl").write_bytes(b"PK")
    with gpu_peer._deepspeed_place(argparse.Namespace(peer_python=None, peer_packages=tmp_path)) as (_, problem):
        assert "half.whl is not a zip file; put its wheels" in problem


def test_a_run_that_would_begin_too_late_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_peer, "_missing", lambda spec: "")
    monkeypatch.setattr(gpu_peer, "_SLOT_SECONDS", 0)
    options = ["--drives", str(tmp_path), "--out", str(tmp_path / "out"), "--set", "tiny", "--peer-python", "python"]
    assert gpu_peer.main(options) == 1
    assert capsys.readouterr().out.count("FAILED: the time of this slot is used up") == 3


def test_a_table_of_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    bench_experts.show([])
    assert capsys.readouterr().out == "\n"
