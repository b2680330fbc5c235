"""Control groups (version 1) that bound and measure a process: memory limit and peak, and the drive's bandwidth."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from swapper.volumes.file_system import describe_drive

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "infinity_bench"
# Whatever stands before -- is a group's file, which the shell joins. Then it becomes the program: every byte of that counts.
_JOINING = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 97; shift; done; shift; exec "$@"'


def why_unavailable(controller: str) -> str | None:
    """None if groups of `controller` can be made here, else the reason in words."""
    if os.geteuid() != 0:
        return "control groups need root"
    if not (_ROOT / controller / "cgroup.procs").exists():
        return f"the version 1 control group controller '{controller}' is not mounted at {_ROOT / controller}"
    if not os.access(_ROOT / controller, os.W_OK):
        return f"{_ROOT / controller} is not writable"
    return None


def block_device(path: Path) -> str | None:
    """``major:minor`` of the whole disk under `path` (rules are refused for partitions); None without (tmpfs, overlay, nfs)."""
    name = describe_drive(path).device
    return None if name is None else Path(f"/sys/class/block/{name}/dev").read_text().strip()


class Cgroup:
    """One named group in each of the controllers asked for. Its processes are killed and it is removed on exit."""

    def __init__(self, name: str, controllers: tuple[str, ...] = ("memory", "blkio")) -> None:
        _remove_stale()
        self._paths = {c: _ROOT / c / f"{_PREFIX}_{os.getpid()}_{name}" for c in controllers}
        for path in self._paths.values():
            path.mkdir()

    def limit_memory(self, num_bytes: int) -> None:
        """The kernel kills a process of the group that cannot stay under `num_bytes`."""
        (self._paths["memory"] / "memory.limit_in_bytes").write_text(str(num_bytes))

    def throttle(self, path: Path, bytes_per_second: int) -> None:
        """Holds reads and writes, each, of the disk under `path` to `bytes_per_second`."""
        device = block_device(path)
        if device is None:
            raise RuntimeError(
                f"{path} lies on no block device that could be throttled: choose a directory on a real disk"
            )
        for direction in ("read", "write"):
            rule = self._paths["blkio"] / f"blkio.throttle.{direction}_bps_device"
            rule.write_text(f"{device} {bytes_per_second}")

    @property
    def task_files(self) -> list[Path]:
        """Files to which a process writes its pid in order to join."""
        return [path / "cgroup.procs" for path in self._paths.values()]

    def command(self, *program: str) -> list[str]:
        """What starts a program that is in the group from its first instruction."""
        return ["/bin/sh", "-c", _JOINING, "sh", *map(str, self.task_files), "--", *program]

    @property
    def counts_memory(self) -> bool:
        """Whether there is a peak, which takes the controller ``memory``."""
        return "memory" in self._paths

    @property
    def peak_bytes(self) -> int:
        """Most memory charged to the group since it was made, or since `reset_peak`."""
        return int((self._paths["memory"] / "memory.max_usage_in_bytes").read_text())

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from the present usage."""
        (self._paths["memory"] / "memory.max_usage_in_bytes").write_text("0")

    @property
    def num_out_of_memory_kills(self) -> int:
        """Processes the kernel has killed because of the memory limit."""
        text = (self._paths["memory"] / "memory.oom_control").read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found.group(1)) if found else 0

    def close(self) -> None:
        """Kills what still runs in the group and removes it. May be called twice."""
        for path in self._paths.values():
            _remove(path)

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def throttled(directory: Path, megabytes_per_second: int) -> Iterator[None]:
    """Reads and writes of this process and its new children are held to so many MB/s each; 0: they are not.

    Raises:
        RuntimeError: the directory lies on no block device.
        OSError: groups cannot be made here.
    """
    if not megabytes_per_second:
        yield
        return
    with Cgroup("throttled", ("blkio",)) as group:
        group.throttle(directory, megabytes_per_second * 1_000_000)
        for file in group.task_files:
            file.write_text(str(os.getpid()))
        try:
            yield
        finally:  # who is in a group when it is removed is killed
            for file in group.task_files:
                (file.parent.parent / file.name).write_text(str(os.getpid()))


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _remove_stale() -> None:
    """Groups of benchmarks that were killed outright: their children died with them, the empty groups stay."""
    for path in _ROOT.glob(f"*/{_PREFIX}_*"):
        pid = path.name.removeprefix(f"{_PREFIX}_").split("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()
