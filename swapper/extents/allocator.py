"""Where in a volume there is room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from swapper.config import round_up
from swapper.errors import ArgumentError, OutOfSpaceError


class SpaceAllocator:
    """Knows the byte ranges of a volume that are taken; must not know what lies in them.

    Best fit: the smallest free range that is large enough is used, so large ones stay whole. Neighbouring free ranges
    join. Not thread safe: its owner locks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # The free ranges follow from the taken ones: each change is one step, of which an interrupt leaves no half.
        self._taken: list[tuple[int, int]] = []
        # Their sizes and starts, in order; None while a change is made, and after one that was interrupted, or came into
        # another one.
        self._sizes: list[tuple[int, int]] | None = None
        self._last_change = object()

    @property
    def free_bytes(self) -> int:
        """What belongs to nobody."""
        return self.capacity_bytes - sum(stop - start for start, stop in self._taken.copy())

    @property
    def largest_free_bytes(self) -> int:
        """The longest free range."""
        return max((stop - start for start, stop in self._free()), default=0)

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
        change = self._last_change = object()
        sizes, self._sizes = self._sizes, None
        if sizes is None:
            sizes = sorted((stop - start, start) for start, stop in self._free())
        index = bisect_left(sizes, (size, 0))
        if index == len(sizes):
            self._sizes = sizes
            raise OutOfSpaceError(name, size, self.free_bytes, self.largest_free_bytes)
        found, offset = sizes.pop(index)
        insort(self._taken, (offset, offset + size))
        if found > size:
            insort(sizes, (found - size, offset + size))
        if self._last_change is change:
            self._sizes = sizes
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give a range back that was taken as a whole. To do so again changes nothing, unless it has been taken again."""
        size = round_up(num_bytes)
        index = bisect_left(self._taken, (offset, offset + size))
        if size and index < len(self._taken) and self._taken[index] == (offset, offset + size):
            change = self._last_change = object()
            sizes, self._sizes = self._sizes, None
            low = self._taken[index - 1][1] if index else 0
            high = self._taken[index + 1][0] if index + 1 < len(self._taken) else self.capacity_bytes
            del self._taken[index]
            if sizes is not None and self._last_change is change:
                for start, stop in ((low, offset), (offset + size, high)):
                    if start < stop:
                        del sizes[bisect_left(sizes, (stop - start, start))]
                insort(sizes, (high - low, low))
                if self._last_change is change:
                    self._sizes = sizes

    def _free(self) -> Iterator[tuple[int, int]]:
        end = 0
        for start, stop in self._taken:
            if start > end:
                yield end, start
            end = stop
        if end < self.capacity_bytes:
            yield end, self.capacity_bytes
