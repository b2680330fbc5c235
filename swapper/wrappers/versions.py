"""A backend that never writes over what somebody may want to go back to.

[Note: versions]
Whoever uses it sees one address space, as of any backend. Below, each of its blocks lies in some slot of a larger space: a
write goes to free slots, and when it is over, these are where its blocks lie. So the same bytes are written as without
versions, and what was there before is still there. A snapshot says which block lies in which slot. A slot is free when
neither a kept snapshot nor the present names it.

    address space      | 0 | 1 | 2 | 3 |                   blocks of 4096 bytes
    slots              | 0 | 1 | 2 | 3 | 1'| 2'|   |   |   1 and 2 were written again; a kept snapshot names 0 1 2 3

Slots are taken in a circle, so what is written together lies together. Slots of a write that failed, or never ends, are
not used again: nobody knows what the drive may still do to them.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from swapper.backend import Batch, Direction, IOBackend, IORequest
from swapper.config import ALIGNMENT, split_at
from swapper.errors import ArgumentError
from swapper.extents.intervals import IntervalSet
from swapper.memory.region import AlignedRegion
from swapper.wrappers.base import BackendWrapper

Runs = npt.NDArray[np.uint32]
"""A snapshot: one row (first block, first slot, number) for each run of blocks that lie one behind the other."""

_TRANSIENT = frozenset({None, errno.EINTR, errno.EAGAIN})
_SHORT = "a transfer stayed short"
_WINDOW_BLOCKS = 1 << 18


class VersionedBackend(BackendWrapper):
    """Knows which slot each block lies in, and which slots are free; must not know what the blocks hold.

    Args:
        inner: Where the slots are; its space must be larger than ``capacity_bytes`` by as much as is ever written between
            two calls of :meth:`retain`, for each snapshot that is kept.
        capacity_bytes: Size of the address space. Multiple of 4096.
    """

    def __init__(self, inner: IOBackend, capacity_bytes: int) -> None:
        super().__init__(inner)
        if capacity_bytes % ALIGNMENT or capacity_bytes > inner.capacity_bytes:
            raise ArgumentError(
                f"capacity_bytes must be a multiple of {ALIGNMENT} and at most {inner.capacity_bytes}, got {capacity_bytes}"
            )
        self.capacity_bytes = capacity_bytes
        self.block_bytes = ALIGNMENT
        self.boundary_bytes = 0  # transfers are cut here as the inner backend wants it
        self._num_slots = inner.capacity_bytes // ALIGNMENT
        self._lock = threading.RLock()  # guards all that follows
        self._slots = np.zeros(
            capacity_bytes // ALIGNMENT, dtype=np.uint32
        )  # by block: its slot + 1, 0 if never written
        self._is_kept = np.zeros(self._num_slots, dtype=np.bool_)  # by slot: a kept snapshot names it
        self._kept: Mapping[int, Runs] = {}
        self._taken = IntervalSet()  # slots of writes on their way, and of those that failed
        self._free = IntervalSet()
        self._free.add(0, self._num_slots)
        self._cursor = 0

    @staticmethod
    def memory_bytes(capacity_bytes: int, inner_bytes: int) -> int:
        """What the map takes, with what :meth:`retain` takes for a moment; but for snapshots, which are small."""
        num_blocks, num_slots = -(-capacity_bytes // ALIGNMENT), -(-inner_bytes // ALIGNMENT)
        return 4 * num_blocks + 5 * num_slots

    def locate(self, offset: int) -> tuple[str, int]:
        """See :class:`IOBackend`."""
        slot = int(self._slots[offset // ALIGNMENT])
        return self.inner.locate((slot - 1) * ALIGNMENT + offset % ALIGNMENT if slot else offset)

    def submit(self, request: IORequest) -> None:
        """Read from where the blocks lie, or write to free slots."""
        if not len(request.memory):
            request.complete(0)
        elif request.direction is Direction.READ:
            self._read(request)
        else:
            self._write(request)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Runs:
        """Where everything lies now that was written; no write may be on its way."""
        rows: list[Runs] = []
        with self._lock:
            for low in range(0, self._slots.size, _WINDOW_BLOCKS):
                window = self._slots[low : low + _WINDOW_BLOCKS]
                blocks = np.flatnonzero(window)
                if not blocks.size:
                    continue
                slots = window[blocks].astype(np.int64) - 1
                starts = np.concatenate([[0], np.flatnonzero((np.diff(blocks) != 1) | (np.diff(slots) != 1)) + 1])
                lengths = np.diff(np.concatenate([starts, [blocks.size]]))
                rows.append(np.stack([blocks[starts] + low, slots[starts], lengths], axis=1).astype(np.uint32))
        return np.concatenate(rows) if rows else np.zeros((0, 3), dtype=np.uint32)

    def retain(self, snapshots: Mapping[int, Runs]) -> None:
        """Keep what these snapshots name, by number, and nothing else but the present."""
        for runs in snapshots.values():
            self._check(runs)
        with self._lock:
            self._kept = dict(snapshots)
            self._recount()

    def restore(self, runs: Runs) -> None:
        """What the snapshot names is the present from now on. No request may be on its way."""
        self._check(runs)
        with self._lock:
            self._slots[:] = 0
            for block, slot, number in runs.tolist():
                self._slots[block : block + number] = np.arange(slot + 1, slot + 1 + number, dtype=np.uint32)
            self._recount()

    @property
    def free_bytes(self) -> int:
        """In free slots."""
        with self._lock:
            return sum(stop - start for start, stop in self._free) * ALIGNMENT

    def _check(self, runs: Runs) -> None:
        wide = runs.astype(np.int64)
        if runs.ndim != 2 or runs.shape[1] != 3:
            raise ArgumentError(f"a snapshot has three columns, not the shape {runs.shape}")
        ends = wide[:, :2] + wide[:, 2:]
        if np.any(ends > (self._slots.size, self._num_slots)):
            raise ArgumentError("a snapshot names blocks or slots that do not exist here")

    def _recount(self) -> None:
        is_kept = np.zeros(self._num_slots, dtype=np.bool_)
        for runs in self._kept.values():
            for _, slot, number in runs.tolist():
                is_kept[slot : slot + number] = True
        self._is_kept = is_kept
        is_used = is_kept.copy()
        present = self._slots[self._slots > 0]
        is_used[present - 1] = True
        for start, stop in self._taken:
            is_used[start:stop] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[True], is_used, [True]]).astype(np.int8)))
        self._free = IntervalSet()
        for start, stop in edges.reshape(-1, 2).tolist():
            self._free.add(start, stop)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _read(self, request: IORequest) -> None:
        first, stop = request.offset // ALIGNMENT, -(-(request.offset + len(request.memory)) // ALIGNMENT)
        with self._lock:
            slots = self._slots[first:stop].tolist()
        parts = []
        for block, slot, number in _runs_of(slots):
            low = max((first + block) * ALIGNMENT, request.offset) - request.offset
            high = min((first + block + number) * ALIGNMENT - request.offset, len(request.memory))
            if slot:
                within = (request.offset + low) % ALIGNMENT
                parts.append(((slot - 1) * ALIGNMENT + within, request.memory[low:high], request.address + low))
            else:
                request.memory[low:high] = bytes(high - low)
        self._move(Direction.READ, parts, len(request.memory), request.complete)

    def _write(self, request: IORequest) -> None:
        start, stop = request.offset, request.offset + len(request.memory)
        first, last = start // ALIGNMENT, -(-stop // ALIGNMENT)
        with self._lock:
            before = self._slots[first:last].tolist()
            ranges = self._allocate(last - first)
        if ranges is None:
            message = (
                "no free slot: more was written since the last commit than there is room for, frozen weights as well, say; "
                "what replaces all of them, as a checkpoint does, is loaded where a durable run begins, in a new directory"
            )
            request.complete(0, OSError(errno.ENOSPC, message))
            return
        # Blocks at the ends that are not written whole get the rest of what they hold.
        cut = {block for block, address in ((first, start), (last - 1, stop)) if address % ALIGNMENT}
        edges = {block: AlignedRegion(ALIGNMENT).array() for block in cut}
        old = [
            ((before[block - first] - 1) * ALIGNMENT, array.data, int(array.__array_interface__["data"][0]))
            for block, array in edges.items()
            if before[block - first] and not request.may_pad
        ]

        def put(is_whole: int, error: OSError | None) -> None:
            if error is None and not is_whole:
                error = OSError(errno.EAGAIN, _SHORT)
            if error is not None:
                self._end_write(request, first, ranges, error)
                return
            for block, array in edges.items():
                low, high = max(block * ALIGNMENT, start), min((block + 1) * ALIGNMENT, stop)
                array[low - block * ALIGNMENT : high - block * ALIGNMENT] = np.frombuffer(
                    request.memory[low - start : high - start], dtype=np.uint8
                )
            self._move(Direction.WRITE, list(parts()), len(request.memory), end)

        def parts() -> Iterator[tuple[int, memoryview, int]]:
            begin = first
            for low, high in ranges:
                inside = [block for block in edges if begin <= block < begin + high - low]
                cuts = sorted({begin, begin + high - low, *inside, *(block + 1 for block in inside)})
                for block, end_block in pairwise(cuts):
                    place = (low + block - begin) * ALIGNMENT
                    if block in edges:
                        array = edges[block]
                        yield place, array.data, int(array.__array_interface__["data"][0])
                    else:
                        head = block * ALIGNMENT - start
                        yield place, request.memory[head : end_block * ALIGNMENT - start], request.address + head
                begin += high - low

        def end(transferred_bytes: int, error: OSError | None) -> None:
            if error is None and transferred_bytes < len(request.memory):
                error = OSError(errno.EAGAIN, _SHORT)
            self._end_write(request, first, ranges, error)

        self._move(Direction.READ, old, 1, put)

    def _move(
        self,
        direction: Direction,
        parts: list[tuple[int, memoryview, int]],
        num_bytes: int,
        then: Callable[[int, OSError | None], None],
    ) -> None:
        """Transfer parts of a request: their place in the slots, their memory, its address. They are taken out of the list.

        ``num_bytes``: What ``then`` is told if all of them went well, and there may be none; else it is told 0.
        """
        batch = Batch(set(), num_bytes, then)
        requests = [
            IORequest(direction, offset + low, memory[low:high], address + low, batch.on_complete)
            for offset, memory, address in parts
            for low, high in split_at(offset, len(memory), self.inner.boundary_bytes)
        ]
        parts.clear()  # it may be over before this thread is: who waits for it must find nobody looking at the memory
        batch.submit(self.inner, requests)

    def _end_write(self, request: IORequest, first: int, ranges: list[tuple[int, int]], error: OSError | None) -> None:
        with self._lock:
            if error is None:
                slots = np.concatenate([np.arange(low + 1, high + 1, dtype=np.uint32) for low, high in ranges])
                present = self._slots[first : first + slots.size]
                released = present[present > 0] - 1
                released = released[~self._is_kept[released]].tolist()
                present[:] = slots
                for low, high in ranges:
                    self._taken.remove(low, high)
                for _, slot, number in _runs_of(released):
                    self._free.add(slot, slot + number)
            elif error.errno in _TRANSIENT:
                for low, high in ranges:
                    self._taken.remove(low, high)
                    self._free.add(low, high)
        request.complete(0 if error is not None else len(request.memory), error)

    def _allocate(self, number: int) -> list[tuple[int, int]] | None:
        """Take so many free slots; None if there are not so many."""
        found: list[tuple[int, int]] = []
        while number:
            piece = self._free.first_overlap(self._cursor, self._num_slots) or self._free.first_overlap(0, self._cursor)
            if piece is None:
                for low, high in found:
                    self._taken.remove(low, high)
                    self._free.add(low, high)
                return None
            low, high = piece[0], min(piece[1], piece[0] + number)
            self._free.remove(low, high)
            self._taken.add(low, high)
            found.append((low, high))
            number -= high - low
            self._cursor = high % self._num_slots
        return found


def _runs_of(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place, first value, number) of each run in which values rise by one; zeros make runs of their own."""
    place = 0
    while place < len(slots):
        value, end = slots[place], place + 1
        while end < len(slots) and slots[end] == (value + end - place if value else 0):
            end += 1
        yield place, value, end - place
        place = end
