"""Control groups of version 2, on a tree of plain files that behaves as the kernel's."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from bench import cgroup
from bench.cgroup import Cgroup, why_unavailable

_FILES = {
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.peak": "7",
        "memory.events": "low 0\nhigh 0\nmax 8\noom 2\noom_kill 3\noom_group_kill 0\n",
    },
    "io": {"io.max": ""},
}


class _Tree:
    """Groups of version 2 as directories, with the parts of the kernel that the code relies on."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "unified"
        self._membership = root / "membership"
        self._holders: set[Path] = set()
        self.removed: list[Path] = []
        self.killed: list[Path] = []
        mkdir, write_text = Path.mkdir, Path.write_text

        def make(path: Path, *arguments: object, **options: object) -> None:
            mkdir(path)
            if path.is_relative_to(self.root):
                self.fill(path, (path.parent / "cgroup.subtree_control").read_text().split())

        def write(path: Path, text: str) -> int:
            if path.name == "cgroup.subtree_control":
                if path.parent in self._holders:
                    raise OSError(errno.EBUSY, "a group with processes has no children with controllers")
                text = " ".join(sorted({*path.read_text().split(), *text.replace("+", "").split()}))
            if path.name == "cgroup.kill":
                self.killed.append(path.parent)
            return write_text(path, text)

        def remove(path: Path) -> None:
            self.removed.append(path)
            shutil.rmtree(path)

        mkdir(self.root)
        for name, replacement in {"mkdir": make, "write_text": write, "rmdir": remove}.items():
            monkeypatch.setattr(Path, name, replacement)
        (root / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {self.root} cgroup2 rw,nsdelegate 0 0\n")
        monkeypatch.setattr(cgroup, "_MOUNTS", root / "mounts")
        monkeypatch.setattr(cgroup, "_MEMBERSHIP", self._membership)
        self.is_member("/")

    def fill(self, group: Path, controllers: Iterable[str], *, enabled: Iterable[str] = ()) -> Path:
        group.joinpath("cgroup.controllers").write_text(" ".join(controllers))
        with (group / "cgroup.subtree_control").open("w") as file:
            file.write(" ".join(enabled))
        for name in ("cgroup.procs", "cgroup.kill"):
            group.joinpath(name).touch()
        for controller in controllers:
            for name, text in _FILES.get(controller, {}).items():
                group.joinpath(name).write_text(text)
        return group

    def is_member(self, path: str) -> None:
        """This process is in the group `path`."""
        self._membership.write_text(f"0::{path}\n")
        self._holders = {self.root / path.lstrip("/")}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Tree:
    return _Tree(tmp_path, monkeypatch)


def _session(tree: _Tree) -> Path:
    """As systemd has it: this process is in a scope whose slice has enabled the memory controller for it."""
    tree.fill(tree.root, ["cpu", "io", "memory", "pids"], enabled=["memory"])
    user = tree.root / "user.slice"
    user.mkdir()
    (user / "cgroup.subtree_control").write_text("+memory")
    (user / "session.scope").mkdir()
    tree.is_member("/user.slice/session.scope")
    return user


def test_a_group_is_made_beside_the_process_that_limits_it(tree: _Tree) -> None:
    user = _session(tree)
    assert why_unavailable("memory") is None
    with Cgroup("case", ("memory",)) as group:
        (folder,) = {file.parent for file in group.task_files}
        assert folder == user / f"infinity_bench_{os.getpid()}_case"
        assert group.memory is not None
        group.memory.limit(5_000_000)
        assert (folder / "memory.max").read_text() == "5000000"
        assert (folder / "memory.swap.max").read_text() == "0", "swap is no way around the limit"
        assert group.memory.has_peak
        assert group.memory.num_out_of_memory_kills == 3
        assert str(folder / "cgroup.procs") in group.command("true")
        group.memory.limit(None)
        assert {(folder / name).read_text() for name in ("memory.max", "memory.swap.max")} == {"max"}
    assert tree.killed == tree.removed == [folder]
    assert not folder.exists()


def test_groups_of_benchmarks_that_were_killed_are_removed(tree: _Tree) -> None:
    user = _session(tree)
    stale, alive = (user / f"infinity_bench_{pid}_old" for pid in (2**22 + 1, os.getpid()))
    for folder in (stale, alive):
        folder.mkdir()
    Cgroup("case", ("memory",)).close()
    assert stale in tree.removed and alive not in tree.removed
