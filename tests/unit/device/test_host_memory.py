"""Free host memory is what the machine has, or what a control group still allows, whichever is less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.device import host_memory

_AVAILABLE = 10_000_000


class _Machine:
    """Fake control groups in a directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = root
        self._membership = root / "membership"
        monkeypatch.setattr(host_memory, "_CGROUP_V1", root / "v1")
        monkeypatch.setattr(host_memory, "_CGROUP_V2", root / "v2")
        monkeypatch.setattr(host_memory, "Path", lambda path: self._membership)
        memory = SimpleNamespace(available=_AVAILABLE)
        monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)

    def is_member(self, *lines: str) -> None:
        self._membership.write_text("".join(f"{line}\n" for line in lines))

    def v1(self, path: str, limit: int, usage: int, cache: int = 0) -> None:
        self._write(f"v1/{path}", "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage)
        statistics = f"cache 5\ninactive_file 1\ntotal_cache 7\ntotal_inactive_file {cache}\n"
        (self.folder / "v1" / path / "memory.stat").write_text(statistics)

    def v2(self, path: str, limit: int | str, usage: int, cache: int = 0) -> None:
        self._write(f"v2/{path}", "memory.max", limit, "memory.current", usage)
        (self.folder / "v2" / path / "memory.stat").write_text(f"anon 3\nactive_file 9\ninactive_file {cache}\n")

    def _write(self, path: str, limit_name: str, limit: int | str, usage_name: str, usage: int) -> None:
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / usage_name).write_text(f"{usage}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(tmp_path, monkeypatch)


def test_without_control_groups_it_is_the_machines(machine: _Machine) -> None:
    assert host_memory.free_bytes() == _AVAILABLE  # no membership file at all
    machine.is_member("11:cpuset:/a", "10:blkio:/b")
    assert host_memory.free_bytes() == _AVAILABLE


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_group_with_less_decides(machine: _Machine, version: str) -> None:
    machine.is_member("4:memory:/job", "1:cpu,cpuacct:/x") if version == "v1" else machine.is_member("0::/job")
    write: Callable[..., None] = getattr(machine, version)
    write("job", 1_000_000, 300_000, 50_000)
    # Clean pages of files that nobody uses are given up for whoever asks.
    assert host_memory.free_bytes() == 750_000
    write("job", 99_000_000, 300_000)
    assert host_memory.free_bytes() == _AVAILABLE


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_group_further_up_may_be_tighter(machine: _Machine, version: str) -> None:
    machine.is_member("4:cpu,memory:/a/b/c") if version == "v1" else machine.is_member("0::/a/b/c")
    write: Callable[..., None] = getattr(machine, version)
    write("a/b/c", 5_000, 1_000)
    write("a/b", 9_000, 7_000)
    write("", 6_000, 1_000)
    assert host_memory.free_bytes() == 2_000


@pytest.mark.parametrize(("limit", "usage", "free"), [("max", 123, 700), (900, 400, 500), (100, 400, 0)])
def test_both_versions_at_once(machine: _Machine, limit: int | str, usage: int, free: int) -> None:
    machine.is_member("4:memory:/job", "0::/job")
    machine.v1("job", 800, 100)
    machine.v2("job", limit, usage)
    assert host_memory.free_bytes() == free


def test_unreadable_files_are_passed_over(machine: _Machine) -> None:
    machine.is_member("0::/a/b")
    machine.v2("a/b", 500, 400)
    (machine.folder / "v2/a/b/memory.current").write_text("")
    assert host_memory.free_bytes() == _AVAILABLE
    machine.v2("a", 900, 100)
    assert host_memory.free_bytes() == 800


def test_the_real_machine_has_some() -> None:
    assert 0 < host_memory.free_bytes() < 1 << 60


@pytest.mark.parametrize(
    ("free", "holds_activations", "reserve"),
    [
        (100 * 10**9, True, 25 * 10**9),
        (100 * 10**9, False, 10 * 10**9),
        (6 * 10**9, True, 2 * 10**9),
        (6 * 10**9, False, 2 * 10**9),
        (3 * 10**9, False, 1_500_000_000),
        (0, True, 0),
    ],
)
def test_an_open_budget_leaves_a_reserve(
    monkeypatch: pytest.MonkeyPatch, free: int, holds_activations: bool, reserve: int
) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: free)
    free_memory = host_memory.find_free_memory(holds_activations=holds_activations)
    assert (free_memory.free_bytes, free_memory.reserve_bytes, free_memory.budget_bytes) == (
        free,
        reserve,
        free - reserve,
    )
    assert f"{free / 1e6:,.0f} MB" in str(free_memory)
    assert f"{reserve / 1e6:,.0f} MB" in str(free_memory)
