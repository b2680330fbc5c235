"""Which of this process's files lie on a drive of a test, or are rings: others may open theirs at any time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(*directories: Path) -> list[str]:
    """What the descriptors are that belong to ``directories`` or to io_uring, in order."""
    found: list[str] = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if "io_uring" in target or any(target.startswith(str(directory)) for directory in directories):
                found.append(target)
    return sorted(found)
