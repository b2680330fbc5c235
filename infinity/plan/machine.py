"""The machine that a training is planned for: this one, or one that is described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from swapper.volumes.directory import Directory

_Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RoomBytes = Callable[[Sequence[Directory]], int | None]
"""What may be stored in some directories together; None where they know no limit."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that drives give and take: when read, when written, and both together in an optimizer step's mix.

    Attributes:
        read_bytes_per_second: sequential reads.
        write_bytes_per_second: sequential writes.
        mixed_bytes_per_second: sum of both directions, 14 bytes read for 12 written.
        measured_at: local date and time, ISO 8601.
    """

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
    """What a training could have of it.

    Attributes:
        host_free_bytes: of its memory.
        drive_free_bytes: of all drives for states together; None where they know no limit.
        device_free_bytes: of a GPU; None where the CPU computes.
        bandwidth: of the drives; None if nobody knows it.
        flops_per_second: of its compute device; None if nobody knows it.
        drive_tbw: terabytes that the drives are rated to take; None if nobody knows it.
        link_bytes_per_second: from host memory to a GPU, and as much back at the same time; None if nobody knows it.
    """

    host_free_bytes: int
    drive_free_bytes: int | None
    device_free_bytes: int | None
    bandwidth: Bandwidth | None = None
    flops_per_second: float | None = None
    drive_tbw: float | None = None
    link_bytes_per_second: float | None = None

    @property
    def uses_host_memory(self) -> bool:
        """Whether the CPU computes, in host memory."""
        return self.device_free_bytes is None

    def room_bytes(self, directories: Sequence[Directory]) -> int | None:
        """What directories that nobody can look at have room for together: they are all on the drives of this description."""
        return together([Room(each, 0, self.drive_free_bytes, 0) for each in directories])


class Room(NamedTuple):
    """What a directory offers: its file system, what is free there, and what a run that goes on has there already."""

    directory: Directory
    file_system: int
    free_bytes: int | None
    held_bytes: int


def together(rooms: Sequence[Room]) -> int | None:
    """What directories give together: what is free in a file system counts once. None: no limit."""
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
