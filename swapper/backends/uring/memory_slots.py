"""The memory that a ring has registered with the kernel ("fixed buffers"), by slot."""

from __future__ import annotations

import bisect
import sys

import numpy as np
import numpy.typing as npt

from swapper.backends.uring.ring import Ring
from swapper.memory.region import AlignedRegion

# A region of 10 GiB takes 10 slots. Without a free one, register_memory() logs it, and transfers work unregistered.
_NUM_SLOTS = 256
_MAX_SLOT_BYTES = 1 << 30  # the kernel's limit on one registered buffer


class MemorySlots:
    """The table of registered memory. Only the ring's thread uses it.

    Args:
        ring: Whose memory it is.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._are_made = False
        self._free = list(range(_NUM_SLOTS - 1, -1, -1))  # a stack: slot 0 is used first
        self._ranges: list[tuple[int, int, int]] = []  # start, end and slot, in order of addresses
        # By slot: an array that keeps the memory mapped. A new mapping at the same address would have other pages than
        # those that the kernel has pinned, and transfers would miss it.
        self._arrays: dict[int, npt.NDArray[np.uint8]] = {}

    def find(self, address: int, num_bytes: int) -> int:
        """Return the slot that holds all of these bytes, or -1."""
        ranges = self._ranges
        if ranges:
            # The last range that begins at `address` or before; maxsize sorts behind each end.
            index = bisect.bisect_right(ranges, (address, sys.maxsize, 0)) - 1
            if index >= 0 and address + num_bytes <= ranges[index][1]:
                return ranges[index][2]
        return -1

    def add(self, region: AlignedRegion) -> list[int]:
        """Register a region and return its slots.

        Raises:
            OSError: It cannot be registered; then nothing of it is.
        """
        if not self._are_made:  # the kernel makes the table once for a ring
            self._ring.make_slots(_NUM_SLOTS)
            self._are_made = True
        array, slots = region.array(), list[int]()
        address = region.address
        stop = address + array.size
        try:
            while address < stop:
                if not self._free:
                    raise OSError(None, f"all {_NUM_SLOTS} places for registered memory are taken")
                num_bytes = min(_MAX_SLOT_BYTES, stop - address)
                self._ring.fill_slot(self._free[-1], address, num_bytes)
                slot = self._free.pop()  # only now: fill_slot may have raised
                slots.append(slot)
                self._arrays[slot] = array
                self._ranges = sorted([*self._ranges, (address, address + num_bytes, slot)])
                address += num_bytes
        except OSError:
            self.remove(slots)
            raise
        return slots

    def remove(self, slots: list[int]) -> None:
        """Release what these slots hold. The kernel keeps pages pinned for transfers that use them now."""
        for slot in slots:
            self._ranges = [held for held in self._ranges if held[2] != slot]
            self._ring.fill_slot(slot, 0, 0)
            self._free.append(slot)
            del self._arrays[slot]

    def clear(self) -> None:
        """Release all memory, once the ring is gone."""
        self._ranges = []
        self._arrays.clear()
