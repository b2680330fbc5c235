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
        return DriveCounters(**{name: now - getattr(before, name) for name, now in vars(self).items()})
