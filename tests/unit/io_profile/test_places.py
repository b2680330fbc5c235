"""Directories that can be measured, and those that cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.cli.profile import profile
from infinity.io_profile import arguments, places
from swapper.volumes.file_system import Drive, describe_drive

_MIB = 1 << 20


def refusal(paths: list[Path], file_bytes: int = _MIB, least_bytes: int = _MIB) -> str:
    with pytest.raises(places.PlaceRefused) as caught:
        places.look_at(paths, file_bytes, least_bytes)
    return str(caught.value)


def test_directories_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "no such directory" in refusal([tmp_path / "missing"])
    assert "not a directory" in refusal([tmp_path / "file"])
    assert "not a directory" in refusal([tmp_path / "dangling"])


def test_a_directory_that_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert "twice" in refusal([tmp_path, tmp_path])
    assert "same directory" in refusal([tmp_path, tmp_path / "link"])


def test_two_directories_on_one_drive_are_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = places.look_at([tmp_path / "a", tmp_path / "b"], _MIB, _MIB)
    assert found.num_drives == 1
    assert any("on one drive" in remark for remark in found.remarks)


def test_tmpfs_is_said_and_a_size_that_is_proposed_fits(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(40 * _MIB)
    assert any("is tmpfs" in remark for remark in places.look_at([directory], _MIB, _MIB).remarks)
    words = refusal([directory], 64 * _MIB)
    assert "40 MiB are free" in words
    proposed = int(words.partition("--size ")[2].partition("MiB")[0])
    assert places.look_at([directory], proposed * _MIB, _MIB).is_memory
    assert "at least 60 MiB" in refusal([directory], 64 * _MIB, 60 * _MIB)


@pytest.mark.root
def test_a_read_only_directory_is_refused(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(_MIB)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    assert "mounted read-only" in refusal([directory], 4096, 4096)


def test_directories_on_one_file_system_share_its_space(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(40 * _MIB)
    (directory / "inner").mkdir()
    words = refusal([directory, directory / "inner"], 30 * _MIB)
    assert "each of the 2 directories" in words
    proposed = int(words.partition("--size ")[2].partition("MiB")[0])
    places.look_at([directory, directory / "inner"], proposed * _MIB, _MIB)


def test_a_network_file_system_gets_the_portable_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(path: Path) -> Drive:
        return replace(describe_drive(path), file_system="nfs4", is_network=True)

    monkeypatch.setattr(places, "describe_drive", describe)
    parsed = arguments.ask(**profile.make_context("profile", [str(tmp_path), "--quick"]).params)
    assert parsed.backends == ("aiofiles",)
    assert any("network file system" in remark for remark in parsed.remarks)
