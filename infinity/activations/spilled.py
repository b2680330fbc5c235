"""Bytes that are spilled to NVMe when all together exceed a capacity, the oldest first, and read again.

[Note: memory on the way] Direct I/O needs page-aligned memory, and torch's begins anywhere. So bytes are written from
an aligned copy and read into aligned memory; otherwise each thread of a backend would need a bounce buffer of its own.
Such memory is used once. It returns to the system when neither the model's graph nor a request refers to it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from infinity.errors import StorageError
from infinity.metrics.clock import StepClock
from swapper import AlignedRegion, Extent, Handle, OutOfSpaceError, Priority, Swapper, SwapperError

_FIRST_BYTES = 64 << 20
"""Size of the first volume, if the drive has room for it. Each further one is as large as all before it, so few are
needed."""
BLOCK_BYTES = 4096
"""Direct I/O moves whole blocks of this size."""
ALIGNMENT = 64
"""torch's allocator aligns to this. A tensor that begins elsewhere would come back aligned, and kernels may then give
other last bits."""


class SpillSpace:
    """Extents in volumes that are opened when they are needed, because the first step shows how much that is."""

    def __init__(self, open_swapper: Callable[[int], Swapper]) -> None:
        """``open_swapper`` opens a volume of that many bytes. `EngineResources` closes it."""
        self._open_swapper = open_swapper
        self._swappers: list[Swapper] = []

    def allocate(self, num_bytes: int) -> tuple[Swapper, Extent]:
        """An extent of ``num_bytes``.

        Raises:
            BudgetTooSmallError: there is no NVMe tier.
            StorageError: its directories have no room.
        """
        for swapper in self._swappers:
            try:
                return swapper, swapper.allocate(num_bytes, "activations")
            except OutOfSpaceError:
                continue
        swapper = self._grow(num_bytes)
        return swapper, swapper.allocate(num_bytes, "activations")

    def _grow(self, num_bytes: int) -> Swapper:
        present = sum(swapper.capacity_bytes for swapper in self._swappers)
        rounded = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        # Spilled so far: 64 MiB, then 64, 128, 256 MiB: the space doubles with each volume.
        wished = max(rounded, present, _FIRST_BYTES)
        try:
            swapper = self._open_swapper(wished)
        except StorageError:
            swapper = self._open_swapper(rounded)  # little room is better than none
        self._swappers.append(swapper)
        return swapper

    def free(self, place: tuple[Swapper, Extent]) -> None:
        """The extent is not needed any more. Its space is free when no request uses it, not even one that hangs."""
        swapper, extent = place
        with contextlib.suppress(SwapperError):
            swapper.free(extent)


class Spilled:
    """Bytes that may leave memory. Where they are: `source`, else `memory`, else `place`."""

    def __init__(self, num_bytes: int, source: Any) -> None:
        self.num_bytes = num_bytes
        self.moved_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        """``num_bytes`` rounded up to whole blocks: what is read and written, and the memory for that."""
        self.source: Any = source
        """The tensor that has the bytes, as long as they are not spilled."""
        self.memory: torch.Tensor | None = None
        """uint8, page-aligned host memory: being written, or being read, or read."""
        self.place: tuple[Swapper, Extent] | None = None
        self.under_way: Handle | None = None
        """The last write or read of `memory`; None: somebody has waited for it."""
        self.is_written = False
        self.is_held = False
        """Whether they count in ``_held_bytes``."""


_Item = TypeVar("_Item", bound=Spilled)


class Spilling(ABC, Generic[_Item]):
    """Keeps items up to a capacity: writes the oldest ones when there are too many bytes, and reads them again."""

    def __init__(self, space: SpillSpace, clock: StepClock, capacity_bytes: int) -> None:
        """
        Args:
            space: for what exceeds the capacity.
            clock: counts the waiting.
            capacity_bytes: of host memory, transfers under way included. Two items are in memory at least, even if they
                exceed it.
        """
        self._space = space
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._oldest_first: deque[_Item] = deque()
        self._writing: deque[_Item] = deque()
        self._held_bytes = 0
        self._slack_bytes = 0
        self.spilled_bytes = 0
        """Bytes that went to NVMe so far."""

    @abstractmethod
    def _source_of(self, item: _Item) -> torch.Tensor | None:
        """The bytes to write of an item, uint8; None: it stays in memory."""

    @property
    def _limit_bytes(self) -> int:
        return max(self._capacity_bytes, self._slack_bytes)

    def _admit(self, item: _Item) -> None:
        """One more item is in memory. Call `_make_room` next."""
        item.is_held = True
        # Two of the largest item: one to compute with, and one on its way. The capacity cannot be less than that.
        self._slack_bytes = max(self._slack_bytes, 2 * item.moved_bytes)
        self._held_bytes += item.moved_bytes
        self._oldest_first.append(item)

    def _make_room(self) -> None:
        """Write the oldest out until the rest fits. Only when too much is on its way, wait for the drive."""
        # Capacity 100 MB, items of 10 MB, so the slack is 20. The 9th item makes 90 staying > 80: the oldest is
        # written, and its memory counts as held until the write has ended. Waiting begins when held > 100: more than
        # two items are on their way, so the drive is slower than forward.
        self._end_writes()
        staying = self._held_bytes - sum(item.moved_bytes for item in self._writing)
        while staying > self._capacity_bytes - self._slack_bytes and self._oldest_first:
            item = self._oldest_first.popleft()
            source = self._source_of(item)
            if source is not None:
                self._start_write(item, source)
                staying -= item.moved_bytes
        while self._writing and self._held_bytes > self._limit_bytes:
            self._end_write(self._writing.popleft())

    def _end_writes(self) -> None:
        """Release the memory of writes that have ended."""
        while self._writing and self._writing[0].under_way is not None and self._writing[0].under_way.done():
            self._end_write(self._writing.popleft())

    def _start_write(self, item: _Item, source: torch.Tensor) -> None:
        item.place = swapper, extent = self._space.allocate(item.num_bytes)
        memory = drive_memory(item.moved_bytes)
        memory[: item.num_bytes].copy_(source)
        item.memory = memory
        item.source = None
        item.under_way = swapper.write(extent, memory)
        self.spilled_bytes += item.moved_bytes
        self._writing.append(item)

    def _end_write(self, item: _Item) -> None:
        self._wait(item, "write")
        item.is_written = True
        self._drop_memory(item)

    def _wait(self, item: _Item, cause: str) -> None:
        if item.under_way is not None:
            self._clock.wait_for(item.under_way, cause)
            item.under_way = None

    def _drop_memory(self, item: _Item) -> None:
        item.memory = None
        if item.is_held:
            item.is_held = False
            self._held_bytes -= item.moved_bytes

    def _start_read(self, item: _Item) -> None:
        if item.place is None:
            raise RuntimeError("a tensor that is needed in backward is gone")
        swapper, extent = item.place
        memory = drive_memory(item.moved_bytes)
        item.under_way = swapper.read(extent, memory, priority=Priority.PREFETCH)
        item.memory = memory
        item.is_held = True
        self._held_bytes += item.moved_bytes

    def _await_memory(self, item: _Item) -> None:
        """Return when the item's bytes are whole in memory, read from NVMe if need be."""
        if item.memory is None:
            self._start_read(item)
        if item not in self._writing:  # what is on its way out is whole in memory
            self._wait(item, "read")

    def _release(self, item: _Item) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(SwapperError):
            self._wait(item, "write")
        if item.place is not None:
            self._space.free(item.place)
        item.source = item.place = item.under_way = None
        self._drop_memory(item)


def drive_memory(num_bytes: int) -> torch.Tensor:
    """See [Note: memory on the way]: uint8; ``num_bytes`` are whole blocks."""
    return torch.from_numpy(AlignedRegion(num_bytes).array())
