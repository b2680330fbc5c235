"""Names that others can guess: what another user has made there is refused, and nothing of ours behind it is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.cli.main import main
from infinity.errors import ConfigError, InfinityError, StorageError
from tests.exactness.lockstep import BF16, engine_on_nvme

_SOMEBODY = 65534


def _train(drive: Path, **settings: Any) -> int:
    """Two steps of a durable run below ``drive``; returns after how many steps it began."""
    torch.manual_seed(0)
    with engine_on_nvme(drive, nn.Linear(64, 64), {**BF16, "infinity": {"durable": True, **settings}}) as engine:
        began: int = engine.global_steps
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
    return began


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Below a directory in which anybody may make files, as in /tmp."""
    tmp_path.chmod(0o1777)
    place = tmp_path / "drive"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of ours that must stay as it is."""
    path = tmp_path / "secret"
    path.write_bytes(b"mine" * 4096)
    yield path
    assert path.read_bytes() == b"mine" * 4096


def _others(path: Path) -> None:
    os.chown(path, _SOMEBODY, _SOMEBODY, follow_symlinks=False)


def _directory_of_somebody(durable: Path, secret: Path) -> None:
    durable.mkdir(mode=0o700)
    _others(durable)


def _directory_for_all(durable: Path, secret: Path) -> None:
    durable.mkdir()
    durable.chmod(0o777)


def _directory_for_the_group(durable: Path, secret: Path) -> None:
    durable.mkdir()
    durable.chmod(0o770)


def _link_of_somebody(durable: Path, secret: Path) -> None:
    (secret.parent / "elsewhere").mkdir(mode=0o700)
    durable.symlink_to(secret.parent / "elsewhere")
    _others(durable)


def _inside(name: str, make: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    def prepare(durable: Path, secret: Path) -> None:
        durable.mkdir(mode=0o700)
        make(durable / name, secret)

    return prepare


def _file_of_somebody(path: Path, secret: Path) -> None:
    path.write_bytes(b"")
    _others(path)


_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, secret: path.symlink_to(secret),
    "link to nothing": lambda path, secret: path.symlink_to(secret.with_name("new")),
    "second name": lambda path, secret: path.hardlink_to(secret),
    "pipe": lambda path, secret: os.mkfifo(path),
    "file of somebody": _file_of_somebody,
}
_NAMES = ("lock", "states-1-of-1", "commit-0000000001")
_TRAPS = {
    "directory of somebody": _directory_of_somebody,
    "directory for all": _directory_for_all,
    "directory for the group": _directory_for_the_group,
    "link of somebody": _link_of_somebody,
    **{f"{kind} as {name}": _inside(name, make) for name in _NAMES for kind, make in _KINDS.items()},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.root] if "somebody" in name else []) for name in _TRAPS]
)
def test_a_durable_run_uses_no_file_or_directory_of_others(name: str, drive: Path, secret: Path) -> None:
    _TRAPS[name](drive / "durable", secret)
    before = sorted(path.relative_to(drive.parent) for path in drive.parent.rglob("*"))
    words = "so it is not used; name a directory that only you can write to|was not made by this run and would be overwritten"
    with pytest.raises(StorageError, match=words):
        _train(drive)
    new = {path.relative_to(drive.parent) for path in drive.parent.rglob("*")} - {*before}
    assert {path.name for path in new} <= {"lock", "states-1-of-1"}


@pytest.mark.parametrize("umask", [0, 0o002])
def test_what_a_run_makes_is_its_owners_alone(umask: int, drive: Path) -> None:
    before = os.umask(umask)
    try:
        assert _train(drive) == 0
        assert _train(drive) == 2
        assert _train(drive, durable_path=str(drive / "mine")) == 0
    finally:
        os.umask(before)
    for place in (drive / "durable", drive / "mine"):
        for path in (place, *place.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_run_log_is_not_written_through_a_link(kind: str, drive: Path, secret: Path) -> None:
    _inside("log.jsonl", _KINDS[kind])(drive / "log", secret)
    with pytest.raises(ConfigError, match="so it is not used"):
        _train(drive, run_log=str(drive / "log"))


def test_left_files_of_others_are_not_waited_for(drive: Path, secret: Path) -> None:
    (drive / ".one.saving-0123456789abcdef").mkdir()
    os.mkfifo(drive / ".one.saving-0123456789abcdef" / ".lock")
    try:
        assert main(["clean", str(drive)]) in (0, 1)
    except InfinityError as error:
        pytest.fail(str(error))
