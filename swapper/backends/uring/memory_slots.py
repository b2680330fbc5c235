"""Memory that a ring has registered, and in which of its slots."""

from __future__ import annotations

import bisect
import sys

import numpy as np
import numpy.typing as npt

from swapper.backends.uring.ring import Ring
from swapper.memory.region import AlignedRegion

_NUM_SLOTS = 256
_MAX_SLOT_BYTES = 1 << 30  # the kernel's limit


class MemorySlots:
    """Knows which memory is registered; belongs to the ring's thread, except :meth:`find`.

    Registered memory stays mapped until it is removed from here, whoever releases it: a new mapping at the same address
    would have other pages than the ones the ring remembers.

    Args:
        ring: Whose memory it is.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._are_made = False
        self._free = list(range(_NUM_SLOTS - 1, -1, -1))
        self._ranges: list[tuple[int, int, int]] = []  # start, end and slot, in order
        self._arrays: dict[int, npt.NDArray[np.uint8]] = {}

    def find(self, address: int, num_bytes: int) -> int:
        """Return the slot that holds all of these bytes, or -1."""
        ranges = self._ranges
        if ranges:
            index = bisect.bisect_right(ranges, (address, sys.maxsize, 0)) - 1
            if index >= 0 and address + num_bytes <= ranges[index][1]:
                return ranges[index][2]
        return -1

    def add(self, region: AlignedRegion) -> list[int]:
        """Register a region and return its slots.

        Raises:
            OSError: It cannot be registered; then nothing of it is.
        """
        if not self._are_made:
            self._ring.make_slots(_NUM_SLOTS)
            self._are_made = True
        array, slots = region.array(), list[int]()
        address = region.address
        stop = address + array.size
        try:
            while address < stop:
                num_bytes = min(_MAX_SLOT_BYTES, stop - address)
                slots.append(self._fill(address, num_bytes, array))
                address += num_bytes
        except OSError:
            self.remove(slots)
            raise
        return slots

    def _fill(self, address: int, num_bytes: int, array: npt.NDArray[np.uint8]) -> int:
        if not self._free:
            raise OSError(None, f"all {_NUM_SLOTS} places for registered memory are taken")
        self._ring.fill_slot(self._free[-1], address, num_bytes)
        slot = self._free.pop()
        self._arrays[slot] = array
        self._ranges = sorted([*self._ranges, (address, address + num_bytes, slot)])
        return slot

    def remove(self, slots: list[int]) -> None:
        """Release what these slots hold; transfers that use it now still end well."""
        for slot in slots:
            self._ranges = [held for held in self._ranges if held[2] != slot]
            self._ring.fill_slot(slot, 0, 0)
            self._free.append(slot)
            del self._arrays[slot]

    def clear(self) -> None:
        """Release all memory, once the ring is gone."""
        self._ranges = []
        self._arrays.clear()
