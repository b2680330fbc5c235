"""Where in a volume there is room."""

from __future__ import annotations

from bisect import bisect_left, insort

from swapper.config import round_up
from swapper.errors import ArgumentError, OutOfSpaceError


class SpaceAllocator:
    """Knows the byte ranges of a volume that are taken; must not know what lies in them.

    Best fit: the smallest free range that is large enough is used, so large ones stay whole. Neighbouring free ranges
    join. Not thread safe: its owner locks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []
        """Starts and stops of the ranges that are taken, in order."""
        self._sizes = [(capacity_bytes, 0)] if capacity_bytes else []
        """Sizes and starts of those that are free, in order."""
        self.free_bytes = capacity_bytes
        """What belongs to nobody."""

    @property
    def largest_free_bytes(self) -> int:
        """The longest free range."""
        return self._sizes[-1][0] if self._sizes else 0

    def allocate(self, num_bytes: int, name: str) -> int:
        """Take ``num_bytes``, rounded up to 4096, and return their offset.

        Raises:
            OutOfSpaceError: No free range is long enough.
        """
        if num_bytes < 0:
            raise ArgumentError(f"extent {name!r} cannot have {num_bytes} bytes")
        size = round_up(num_bytes)
        if size == 0:
            return 0
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            raise OutOfSpaceError(name, size, self.free_bytes, self.largest_free_bytes)
        found, offset = self._sizes.pop(index)
        insort(self._taken, (offset, offset + size))
        self.free_bytes -= size
        if found > size:
            insort(self._sizes, (found - size, offset + size))
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give a range back that was taken as a whole. To do so again changes nothing, unless it has been taken again."""
        size = round_up(num_bytes)
        index = bisect_left(self._taken, (offset, offset + size))
        if size and index < len(self._taken) and self._taken[index] == (offset, offset + size):
            low = self._taken[index - 1][1] if index else 0
            high = self._taken[index + 1][0] if index + 1 < len(self._taken) else self.capacity_bytes
            del self._taken[index]
            self.free_bytes += size
            for start, stop in ((low, offset), (offset + size, high)):
                if start < stop:
                    del self._sizes[bisect_left(self._sizes, (stop - start, start))]
            insort(self._sizes, (high - low, low))
