"""A volume that somebody else owns, for one swapper after the other."""

from __future__ import annotations

import os

from swapper.measure.pattern import FileRange
from swapper.volumes.striping import StripeMap, deal
from swapper.volumes.volume import Volume


class BorrowedVolume(Volume):
    """Knows the files of another volume; closing it closes nothing.

    A backend closes its volume when it is closed itself. This lets several backends use the same files in turn.

    Args:
        owner: Has the files; must stay open meanwhile.
        capacity_bytes: So much of its address space is used.
    """

    def __init__(self, owner: Volume, capacity_bytes: int) -> None:
        self.__dict__.update(vars(owner))
        self.capacity_bytes = min(capacity_bytes, owner.capacity_bytes)

    def restripe(self, stripe_bytes: int) -> None:
        """Lay other stripes over the same parts of the files; a single file has none.

        Args:
            stripe_bytes: Their length, a multiple of 4096.
        """
        if not self.stripe_bytes:
            return
        rooms = [num_bytes // stripe_bytes for num_bytes in self._used_bytes()]
        # What lies on each drive follows from its speed.
        cycle = deal(rooms)
        # Whole cycles only: at its end, too, the address space must lie on all drives.
        num_cycles = min((rooms[column] // cycle.count(column) for column in cycle), default=0)
        num_stripes = num_cycles * len(cycle)
        self._map = StripeMap(num_stripes, stripe_bytes, rooms, rooms, range(len(rooms)), rooms)
        self.stripe_bytes = stripe_bytes
        self.capacity_bytes = num_stripes * stripe_bytes

    def _used_bytes(self) -> list[int]:
        """How far the address space reaches into each file."""
        used = [0 for _ in self.files]
        for column, file_offset, low, high in self.pieces(0, self.capacity_bytes):
            used[column] = max(used[column], file_offset + high - low)
        return used

    def close(self) -> None:
        """Leave the files to their owner."""

    def ranges(self, offset: int, num_bytes: int) -> list[FileRange]:
        """Return where a range of the address space lies in the files."""
        return [FileRange(column, start, high - low) for column, start, low, high in self.pieces(offset, num_bytes)]

    def drop_cache(self) -> None:
        """Have the next reads go to the drives, also where they pass through the page cache."""
        self.sync()  # only clean pages can be dropped
        for file in self.files:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
