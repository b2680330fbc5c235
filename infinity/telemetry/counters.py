"""What the drives have done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DriveCounters:
    """A snapshot of the NVMe tier; several drives together. Busy seconds count time with any of them at work once."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_busy_seconds: float = 0.0
    write_busy_seconds: float = 0.0
    busy_seconds: float = 0.0

    def since(self, before: DriveCounters) -> DriveCounters:
        """What happened between two snapshots."""
        return DriveCounters(
            self.read_bytes - before.read_bytes,
            self.write_bytes - before.write_bytes,
            self.read_busy_seconds - before.read_busy_seconds,
            self.write_busy_seconds - before.write_busy_seconds,
            self.busy_seconds - before.busy_seconds,
        )
