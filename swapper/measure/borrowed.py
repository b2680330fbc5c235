"""A view of another volume, so that several backends can use its files in turn."""

from __future__ import annotations

import os

from swapper.volumes.striping import StripeMap, deal
from swapper.volumes.volume import Volume


class BorrowedVolume(Volume):
    """The files of another volume. A backend closes its volume, but to close this one closes nothing.

    Args:
        owner: Has the files; must stay open meanwhile.
        num_bytes: How many bytes are used, from the first address on.
        stripe_bytes: Length of the stripes over them; a single file has none. Multiple of 4096.
    """

    def __init__(self, owner: Volume, num_bytes: int, stripe_bytes: int) -> None:
        self.__dict__.update(vars(owner))  # all attributes, without the constructor, which makes files
        self.capacity_bytes = num_bytes
        if not self.stripe_bytes:
            return
        # The used parts of the files are striped anew.
        # Two files with 24 and 8 MiB used, new stripes of 2 MiB: rooms = [12, 4], cycle = [0, 0, 1, 0], and
        # min(12 // 3, 4 // 1) = 4 cycles: 16 stripes, 32 MiB.
        used = [0 for _ in self.files]
        for column, file_offset, low, high in self.file_ranges(0, self.capacity_bytes):
            used[column] = max(used[column], file_offset + high - low)
        rooms = [num_bytes // stripe_bytes for num_bytes in used]
        cycle = deal(rooms)  # a drive's used bytes are in proportion to its speed, so they serve as the speed
        # Whole cycles only: with other files full, the end of the address space would be on one drive, and measured so.
        num_stripes = len(cycle) * min((rooms[column] // cycle.count(column) for column in cycle), default=0)
        self._map = StripeMap(num_stripes, stripe_bytes, rooms, rooms, range(len(rooms)), rooms)
        self.stripe_bytes = stripe_bytes
        self.capacity_bytes = num_stripes * stripe_bytes

    def close(self) -> None:
        """Leave the files to their owner."""

    def drop_cache(self) -> None:
        """Drop the files from the page cache, so that the next reads come from the drives."""
        self.sync()  # only clean pages can be dropped
        for file in self.files:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
