"""The machine to plan for: this one, or a described one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from swapper.volumes.directory import Directory

_Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RoomBytes = Callable[[Sequence[Directory]], int | None]
"""Returns how many bytes fit into some directories together; None: no limit."""


@dataclass(frozen=True)
class Bandwidth:
    """Measured bytes per second of the drives.

    Attributes:
        read_bytes_per_second: sequential reads.
        write_bytes_per_second: sequential writes.
        mixed_bytes_per_second: sum of both directions, 14 bytes read for 12 written.
        measured_at: local date and time, ISO 8601.
    """

    # The mix is that of AdamW with bf16 weights and remainders. Per parameter, forward and backward read 2 + 2 bytes of
    # weights, and the update reads a record of 10 bytes. It writes 10 + 2.

    read_bytes_per_second: _Speed
    write_bytes_per_second: _Speed
    mixed_bytes_per_second: _Speed
    measured_at: str

    @property
    def date(self) -> str:
        """The day of the measurement."""
        return self.measured_at.partition("T")[0]


@dataclass(frozen=True)
class Machine:
    """The resources of a machine that are free for a training.

    Attributes:
        host_free_bytes: host memory.
        drive_free_bytes: all drives for states together; None: no limit.
        device_free_bytes: GPU memory; None if the CPU computes.
        bandwidth: of the drives; None if unknown.
        flops_per_second: of the compute device; None if unknown.
        drive_tbw: terabytes that the drives are rated to write (TBW); None if unknown.
        link_bytes_per_second: from host memory to a GPU, with as much back at the same time; None if unknown.
        updates_per_second: parameters that the CPU updates with AdamW, states in memory; None if unknown.
    """

    host_free_bytes: int
    drive_free_bytes: int | None
    device_free_bytes: int | None
    bandwidth: Bandwidth | None = None
    flops_per_second: float | None = None
    drive_tbw: float | None = None
    link_bytes_per_second: float | None = None
    updates_per_second: float | None = None

    @property
    def uses_host_memory(self) -> bool:
        """Whether the CPU computes, in host memory."""
        return self.device_free_bytes is None

    def room_bytes(self, directories: Sequence[Directory]) -> int | None:
        """How many bytes fit into directories of a described machine: all are on its drives."""
        return together([Room(each, 0, self.drive_free_bytes, 0) for each in directories])


class Room(NamedTuple):
    """A directory with its file system, that one's free bytes, and the bytes that a resumed run already has there."""

    directory: Directory
    file_system: int
    free_bytes: int | None
    held_bytes: int


def together(rooms: Sequence[Room]) -> int | None:
    """How many bytes fit into directories together; None: no limit."""
    # Free bytes of a file system count once, however many directories are on it. A directory may also have a capacity
    # of its own. Worked example: two directories on one file system with 100 free, capacities 30 and 40: min(30 + 40,
    # 100) = 70. If one of them has no capacity: 100. A third on another file system with 50 free adds 50.
    total = 0
    for file_system in {room.file_system for room in rooms}:
        sharing = [room for room in rooms if room.file_system == file_system]
        capacities = [room.directory.capacity_bytes for room in sharing]
        known = [each for each in capacities if each is not None]
        limits = [sum(known)] if len(known) == len(capacities) else []
        if (free := sharing[0].free_bytes) is not None:
            limits.append(free + sum(room.held_bytes for room in sharing))
        if not limits:
            return None
        total += min(limits)
    return total
