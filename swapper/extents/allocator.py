"""The allocator of a volume's space."""

from __future__ import annotations

import threading

from swapper.config import round_up
from swapper.errors import ArgumentError, OutOfSpaceError
from swapper.extents.intervals import IntervalSet
from swapper.sync import interrupts
from swapper.sync.reentry import refuse_owned


class SpaceAllocator:
    """Best-fit allocator of byte ranges. Thread safe."""

    # Example: capacity 32 KiB. a = allocate(8 KiB) gets 0, b = allocate(4 KiB) gets 8 KiB, c = allocate(12 KiB) gets 12
    # KiB. Free: [24, 32) KiB. Release of a: free are [0, 8) and [24, 32). allocate(4 KiB) takes the smallest range that
    # is large enough (of two equal ones the first): [0, 4). Large free ranges stay whole. Release of b then frees [8,
    # 12), which joins [4, 8): one range of 8 KiB.

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes  # sum over _free
        self._lock = threading.RLock()  # guards both; see [Note: coming in between] in swapper.sync.reentry
        self._free = IntervalSet()
        self._free.add(0, capacity_bytes)

    def allocate(self, num_bytes: int, name: str) -> int:
        """Take ``num_bytes``, rounded up to 4096, and return their offset.

        Raises:
            OutOfSpaceError: No free range is long enough.
            ReentryError: A signal handler asks, in the midst of another call.
        """
        if num_bytes < 0:
            raise ArgumentError(f"extent {name!r} cannot have {num_bytes} bytes")
        size = round_up(num_bytes)
        if size == 0:
            return 0  # an empty extent takes no space, and release() adds nothing
        refuse_owned(self._lock, "allocating an extent")
        with interrupts.uninterrupted(), self._lock:  # an interrupt would leave the lists torn
            # Linear in the number of free ranges: there are few, as extents are made when an engine begins.
            lengths = [(stop - start, start) for start, stop in self._free]
            fitting = [each for each in lengths if each[0] >= size]
            if not fitting:
                largest_bytes, _ = max(lengths, default=(0, 0))
                raise OutOfSpaceError(name, size, self.free_bytes, largest_bytes)
            _, offset = min(fitting)
            self._free.remove(offset, offset + size)
            self.free_bytes -= size
            return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give an allocated range back, once."""
        size = round_up(num_bytes)
        with self._lock:
            self._free.add(offset, offset + size)
            self.free_bytes += size
