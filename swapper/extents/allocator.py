"""The allocator of a volume's space."""

from __future__ import annotations

from bisect import bisect_left, insort

from swapper.config import round_up
from swapper.errors import ArgumentError, OutOfSpaceError


class SpaceAllocator:
    """Best-fit allocator of byte ranges. Not thread safe: `Swapper._allocator_lock` guards it."""

    # Example: capacity 32 KiB. a = allocate(8 KiB) gets 0, b = allocate(4 KiB) gets 8 KiB, c = allocate(12 KiB) gets 12
    # KiB. Free: [24, 32) KiB. Release of a: free are [0, 8) and [24, 32). allocate(4 KiB) takes the smallest range that
    # is large enough (of two equal ones the first): [0, 4). Large free ranges stay whole. Release of b then frees [8,
    # 12), which joins [4, 8): one range of 8 KiB.

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []  # (start, stop) of allocated ranges, sorted
        self._sizes = [(capacity_bytes, 0)] if capacity_bytes else []  # (size, start) of free ranges, sorted
        self.free_bytes = capacity_bytes  # sum over _sizes

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
            return 0  # an empty extent takes no space, and release() skips it
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
        """Give an allocated range back. A second call does nothing, unless the range was allocated again."""
        size = round_up(num_bytes)
        index = bisect_left(self._taken, (offset, offset + size))
        if size and index < len(self._taken) and self._taken[index] == (offset, offset + size):
            # The hole between both taken neighbours: what of it is not this range is free already, at most two pieces.
            low = self._taken[index - 1][1] if index else 0
            high = self._taken[index + 1][0] if index + 1 < len(self._taken) else self.capacity_bytes
            del self._taken[index]
            self.free_bytes += size
            for start, stop in ((low, offset), (offset + size, high)):
                if start < stop:
                    del self._sizes[bisect_left(self._sizes, (stop - start, start))]
            insort(self._sizes, (high - low, low))
