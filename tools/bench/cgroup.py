"""Control groups that limit and measure a process: its memory, and the bandwidth of a drive.

Works with both versions. ``/proc/self/mounts`` says which one each controller belongs to:

- version 1: groups are made at the controller's root, which needs root.
- version 2: groups are made below the nearest group, from the one of this process upwards, that is writable and can enable
  the controller for its children. Root has such a group, and so has a user to whom systemd delegates one.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swapper.volumes.file_system import describe_drive

_MOUNTS, _MEMBERSHIP = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
_PREFIX = "infinity_bench"
# blkio of version 1 is called io in version 2.
_VERSION_2_NAMES = {"blkio": "io"}
# What stands before -- are files of groups, which the shell joins. Then it becomes the program, so its own memory
# counts.
_JOINING = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 97; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class _Hierarchy:
    """Where a controller's groups are."""

    version: int
    mount: Path
    own: Path
    """The group of this process."""


def _find_hierarchy(controller: str) -> _Hierarchy | None:
    # A machine may have both versions mounted: version 1 wins for a controller that it has.
    unified = None
    for line in _MOUNTS.read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return _Hierarchy(1, Path(mount), _own_group(Path(mount), controller))
        if kind == "cgroup2":
            unified = Path(mount)
    return None if unified is None else _Hierarchy(2, unified, _own_group(unified, ""))


def _own_group(mount: Path, controller: str) -> Path:
    """The group of this process; in a container whose ``/proc`` names groups outside of it, the nearest one inside."""
    group = mount
    for line in _MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # A line is "4:memory:/user.slice" in version 1, and "0::/user.slice" in version 2.
            group = mount / posixpath.normpath(path).lstrip("/")
    # A container sees its group's path on the host, which is not mounted in it.
    while group != mount and not group.is_dir():
        group = group.parent
    return group


def _find_parent(hierarchy: _Hierarchy, controllers: list[str]) -> Path | None:
    """The group below which new ones with these controllers can be made."""
    if hierarchy.version == 1:
        # At the root: groups inside the own one would share its limits.
        return hierarchy.mount if os.geteuid() == 0 and os.access(hierarchy.mount, os.W_OK) else None
    names = {_VERSION_2_NAMES.get(controller, controller) for controller in controllers}
    # From the own group upwards: version 2 lets no group with processes enable controllers for its children, but for
    # the root.
    candidates = (hierarchy.own, *hierarchy.own.parents)
    below_mount = (group for group in candidates if group.is_relative_to(hierarchy.mount))
    return next((group for group in below_mount if _can_enable(group, names)), None)


def _can_enable(group: Path, controllers: set[str]) -> bool:
    """Enable the controllers for the children of a group of version 2, and say whether that has worked."""
    if not controllers <= set((group / "cgroup.controllers").read_text().split()):
        return False
    if not all(os.access(path, os.W_OK) for path in (group, group / "cgroup.procs")):
        return False
    enabled = group / "cgroup.subtree_control"
    missing = sorted(controllers - set(enabled.read_text().split()))
    try:
        if missing:
            enabled.write_text(" ".join(f"+{name}" for name in missing))
    except OSError:  # refused to a group that has processes of its own, unless it is the root
        return False
    return True


def why_unavailable(controller: str) -> str | None:
    """None if groups of `controller` ("memory" or "blkio") can be made here, else the reason in words."""
    hierarchy = _find_hierarchy(controller)
    if hierarchy is None:
        return f"no control group controller '{controller}' is mounted"
    if _find_parent(hierarchy, [controller]) is not None:
        return None
    if hierarchy.version == 1:
        return "control groups (version 1) need root" if os.geteuid() != 0 else f"{hierarchy.mount} is not writable"
    name = _VERSION_2_NAMES.get(controller, controller)
    return (
        f"no control group (version 2) from {hierarchy.own} up to {hierarchy.mount} is writable and can enable the "
        f"controller '{name}' for new groups; root can outside of a container, and a user in a delegated group"
    )


def block_device(path: Path) -> str | None:
    """``major:minor`` of the whole disk under `path` (rules are refused for partitions); None without (tmpfs, overlay, nfs)."""
    name = describe_drive(path).device
    return None if name is None else Path(f"/sys/class/block/{name}/dev").read_text().strip()


class MemoryGroup:
    """The memory limit and peak of the group whose directory is `folder`, of either version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_version_2 = (folder / "memory.max").exists()
        self._peak_file: IO[bytes] | None = None

    def limit(self, num_bytes: int | None) -> None:
        """Let the kernel kill processes of the group that need more than `num_bytes`; None removes the limit."""
        if not self._is_version_2:
            (self._folder / "memory.limit_in_bytes").write_text(str(-1 if num_bytes is None else num_bytes))
            return
        # Without swap the limit is one of RAM. Otherwise the kernel would page out what exceeds it.
        swap = self._folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("max" if num_bytes is None else "0")
        (self._folder / "memory.max").write_text("max" if num_bytes is None else str(num_bytes))

    @property
    def has_peak(self) -> bool:
        """False for version 2 before Linux 5.19."""
        return self._peak_path.exists()

    @property
    def peak_bytes(self) -> int:
        """Most memory charged to the group since it was made, or since `reset_peak`."""
        # A reset holds for the descriptor that made it, so the peak is read by that one.
        if self._peak_file is not None:
            self._peak_file.seek(0)
            return int(self._peak_file.read())
        return int(self._peak_path.read_text())

    def reset_peak(self) -> bool:
        """Start `peak_bytes` again from the present usage. False if that is impossible: version 2 before Linux 6.12."""
        if not self._is_version_2:
            self._peak_path.write_text("0")
            return True
        try:  # version 2 counts anew for this file descriptor alone
            if self._peak_file is None:
                self._peak_file = self._peak_path.open("r+b", buffering=0)
            self._peak_file.seek(0)
            self._peak_file.write(b"0")
        except OSError:
            return False
        return True

    @property
    def num_out_of_memory_kills(self) -> int:
        """Processes the kernel has killed because of the memory limit."""
        text = (self._folder / ("memory.events" if self._is_version_2 else "memory.oom_control")).read_text()
        # Both files have a line "oom_kill 3".
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found.group(1)) if found else 0

    def close(self) -> None:
        """Close the file of the peak. May be called twice."""
        if self._peak_file is not None:
            self._peak_file.close()
            self._peak_file = None

    @property
    def _peak_path(self) -> Path:
        return self._folder / ("memory.peak" if self._is_version_2 else "memory.max_usage_in_bytes")


def set_bandwidth(folder: Path, device: str, read: int | None, write: int | None) -> None:
    """Limit a group's bytes per second from and to the disk ``major:minor``; None: no limit."""
    if (folder / "io.max").exists():
        rates = {"rbps": read, "wbps": write}
        rule = " ".join(f"{name}={'max' if rate is None else rate}" for name, rate in rates.items())
        (folder / "io.max").write_text(f"{device} {rule}")
        return
    for direction, rate in (("read", read), ("write", write)):
        # 0 removes a rule of version 1.
        (folder / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {rate or 0}")


class Cgroup:
    """A named group with the controllers "memory" and "blkio", or one of them. On exit it is removed, its processes killed.

    Attributes:
        memory: its memory limit and peak; None without that controller.

    Raises:
        OSError: it cannot be made here; `why_unavailable` says why.
    """

    def __init__(self, name: str, controllers: tuple[str, ...] = ("memory", "blkio")) -> None:
        self._paths: dict[str, Path] = {}
        for controller, parent in _parents(controllers).items():
            # Names have our pid, so a group of a dead benchmark is recognized.
            _remove_stale(parent)
            self._paths[controller] = parent / f"{_PREFIX}_{os.getpid()}_{name}"
        for path in self._folders:
            path.mkdir()
        self.memory = MemoryGroup(self._paths["memory"]) if "memory" in self._paths else None

    @property
    def _folders(self) -> list[Path]:
        # Version 1 has a folder per controller.
        return list(dict.fromkeys(self._paths.values()))  # of version 2 there is one for all controllers

    def throttle(self, path: Path, bytes_per_second: int) -> None:
        """Holds reads and writes, each, of the disk under `path` to `bytes_per_second`."""
        device = block_device(path)
        if device is None:
            problem = f"{path} lies on no block device that could be throttled"
            raise RuntimeError(f"{problem}: choose a directory on a real disk")
        set_bandwidth(self._paths["blkio"], device, bytes_per_second, bytes_per_second)

    @property
    def task_files(self) -> list[Path]:
        """Files to which a process writes its pid in order to join."""
        return [folder / "cgroup.procs" for folder in self._folders]

    def command(self, *program: str) -> list[str]:
        """Return a command whose program is in the group from its first instruction."""
        return ["/bin/sh", "-c", _JOINING, "sh", *map(str, self.task_files), "--", *program]

    def close(self) -> None:
        """Kills what still runs in the group and removes it. May be called twice."""
        if self.memory is not None:
            self.memory.close()
        for folder in self._folders:
            _remove(folder)

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parents(controllers: tuple[str, ...]) -> dict[str, Path]:
    """Return the parent of each controller's new group; all controllers of version 2 have the same."""
    hierarchies = {controller: _find_hierarchy(controller) for controller in controllers}
    unified = [name for name, hierarchy in hierarchies.items() if hierarchy is not None and hierarchy.version == 2]
    parents = {}
    for controller, hierarchy in hierarchies.items():
        # Version 2 has one group for all controllers, so its parent must enable all of them.
        together = unified if controller in unified else [controller]
        parent = None if hierarchy is None else _find_parent(hierarchy, together)
        if parent is None:
            reason = why_unavailable(controller) or f"no control group can have {' and '.join(together)} together"
            raise OSError(f"a control group cannot be made: {reason}")
        parents[controller] = parent
    return parents


def _remove(folder: Path) -> None:
    # A group can be removed when its last process is reaped, which takes the kernel a moment.
    deadline = time.monotonic() + 20.0
    while folder.exists():
        _kill_all(folder)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _kill_all(folder: Path) -> None:
    kill = folder / "cgroup.kill"
    if kill.exists():  # version 2 since Linux 5.14
        kill.write_text("1")
        return
    # Version 1, and old kernels. A process may fork in between: the caller repeats this until the group is empty.
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove_stale(parent: Path) -> None:
    """Remove empty groups of benchmarks that were killed: their children died with them."""
    for path in parent.glob(f"{_PREFIX}_*"):
        pid = path.name.removeprefix(f"{_PREFIX}_").split("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()
