"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def resident_bytes(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (largest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_high_water() -> None:
    """Starts `VmHWM` again, so that the peak of training is not hidden behind that of building the model."""
    with contextlib.suppress(OSError):  # not every kernel has it
        Path("/proc/self/clear_refs").write_text("5")
