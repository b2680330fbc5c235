"""A drive of a given, steady speed: this process and fio in a control group that the kernel holds back."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.cgroup import Cgroup, block_device, why_unavailable

_CONTROLLER = "blkio"
# Waits until its parent has closed the pipe, in whatever way that ended, and removes the group it was told of.
_REMOVE_AFTERWARDS = """
read _
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    [ -d "$1" ] || exit 0
    rmdir "$1" 2>/dev/null && exit 0
    sleep 0.2
done
"""


def why_not(directories: Sequence[Path]) -> str | None:
    """None if the drives under these directories can be throttled here, else the reason in words."""
    reason = why_unavailable(_CONTROLLER)
    if reason is not None:
        return reason
    for directory in directories:
        if block_device(directory) is None:
            return f"{directory} lies on no block device that could be throttled"
    return None


class Throttle:
    """While it is entered, this process and those it starts move no more than so many bytes per second, each way."""

    def __init__(self, directories: Sequence[Path], bytes_per_second: int) -> None:
        self._directories = list(directories)
        self._bytes_per_second = bytes_per_second

    def __enter__(self) -> Throttle:
        self._home = _present_group()
        self._group = Cgroup("profile_io", (_CONTROLLER,))
        (self._join,) = self._group.task_files
        # A process that is killed outright cannot remove its group, and a group outlives its processes.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AFTERWARDS, "sh", str(self._join.parent)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            for directory in self._directories:
                self._group.throttle(directory, self._bytes_per_second)
            self._join.write_text("0")  # "0" is the writing process, with all its threads
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        # First out of it: closing a group kills what is in it.
        self._home.write_text("0")
        self._group.close()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


def _present_group() -> Path:
    """The file that takes this process back to where it is now."""
    root = Path("/sys/fs/cgroup") / _CONTROLLER
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if _CONTROLLER in controllers.split(","):
            home = root / path.lstrip("/") / "cgroup.procs"
            if home.exists():
                return home
    return root / "cgroup.procs"
