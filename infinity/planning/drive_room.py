"""What directories have room for: what is free there, and what a run that goes on has there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infinity.config.schema.directories import existing
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive
from swapper.volumes.left_runs import bytes_of_run


class Room(NamedTuple):
    """What a directory offers: its file system, what is free there, and what a run that goes on has there already."""

    directory: Directory
    file_system: int
    free_bytes: int | None
    held_bytes: int

    @classmethod
    def of(cls, directory: Directory) -> Room:
        """As it is now.

        Raises:
            VolumeError: nothing can be said of it.
        """
        drive = describe_drive(existing(directory.path.absolute()))
        free = drive.free_bytes if drive.total_bytes else None
        return cls(directory, drive.device_number, free, bytes_of_run(directory.path))


def room_bytes(directories: Sequence[Directory]) -> int | None:
    """What they have room for together, on this machine; None: no limit.

    Raises:
        VolumeError: nothing can be said of one.
    """
    return together([Room.of(each) for each in directories])


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
