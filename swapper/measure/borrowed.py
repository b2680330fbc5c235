"""A volume that somebody else owns, for one backend after the other."""

from __future__ import annotations

import os

from swapper.volumes.striping import StripeMap, deal
from swapper.volumes.volume import Volume


class BorrowedVolume(Volume):
    """Knows the files of another volume; closing it closes nothing.

    A backend closes its volume when it is closed itself. This lets several backends use the same files in turn.

    Args:
        owner: Has the files; must stay open meanwhile.
        num_bytes: Of these, the first of its address space.
        stripe_bytes: Length of the stripes over them; a single file has none. Multiple of 4096.
    """

    def __init__(self, owner: Volume, num_bytes: int, stripe_bytes: int) -> None:
        self.__dict__.update(vars(owner))
        self.capacity_bytes = num_bytes
        if self.stripe_bytes:
            self._restripe(stripe_bytes)

    def _restripe(self, stripe_bytes: int) -> None:
        """Lay other stripes over the parts of the files that are used."""
        used = [0 for _ in self.files]
        for column, file_offset, low, high in self.file_ranges(0, self.capacity_bytes):
            used[column] = max(used[column], file_offset + high - low)
        rooms = [num_bytes // stripe_bytes for num_bytes in used]
        cycle = deal(rooms)  # what lies on each drive follows from its speed
        # Whole cycles only: at its end, too, the address space must lie on all drives.
        num_stripes = len(cycle) * min((rooms[column] // cycle.count(column) for column in cycle), default=0)
        self._map = StripeMap(num_stripes, stripe_bytes, rooms, rooms, range(len(rooms)), rooms)
        self.stripe_bytes = stripe_bytes
        self.capacity_bytes = num_stripes * stripe_bytes

    def close(self) -> None:
        """Leave the files to their owner."""

    def drop_cache(self) -> None:
        """Have the next reads go to the drives, also where they pass through the page cache."""
        self.sync()  # only clean pages can be dropped
        for file in self.files:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
