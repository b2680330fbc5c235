"""Where in a volume there is room."""

from __future__ import annotations

from swapper.config import round_up
from swapper.errors import ArgumentError, OutOfSpaceError
from swapper.intervals import IntervalSet


class SpaceAllocator:
    """Knows the free byte ranges of a volume; must not know what lies in the others.

    Best fit: the smallest free range that is large enough is used, so large ones stay whole. Neighbouring free ranges
    join. Not thread safe: its owner locks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._free = IntervalSet()
        self._free.add(0, capacity_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """The longest free range."""
        return max((stop - start for start, stop in self._free), default=0)

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
        best: tuple[int, int] | None = None
        for start, stop in self._free:
            length = stop - start
            if length >= size and (best is None or length < best[0]):
                best = (length, start)
        if best is None:
            raise OutOfSpaceError(name, size, self.free_bytes, self.largest_free_bytes)
        offset = best[1]
        self._free.remove(offset, offset + size)
        self.free_bytes -= size
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give a range back."""
        size = round_up(num_bytes)
        if size:
            self._free.add(offset, offset + size)
            self.free_bytes += size
