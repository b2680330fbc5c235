"""A copy-on-write backend: it never overwrites blocks that a kept snapshot names.

[Note: versions]
The address space of this backend consists of blocks, and each block is stored in a slot of the inner backend's larger
space. A write goes to free slots. When it has ended, the map from blocks to slots points to these. So no more bytes are
written than without versions, and the old ones are still there. A snapshot is a copy of the map. A slot is free when
neither a kept snapshot nor the present map names it.

    address space      | 0 | 1 | 2 | 3 |                   blocks of 4096 bytes
    slots              | 0 | 1 | 2 | 3 | 1'| 2'|   |   |   1 and 2 were written again; a kept snapshot names 0 1 2 3

The map has slot + 1 for each block: [1, 5, 6, 4] here. As a snapshot it has three rows (first block, first slot,
number): (0, 0, 1), (1, 4, 2) and (3, 3, 1).

Slots are taken in a circle, so that bytes of one write are stored together. Slots of a write that the drive failed, or
never ended, are not used again: it may still write to them.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from swapper.backend import Batch, Direction, EndCallback, IOBackend, IORequest
from swapper.config import ALIGNMENT, split_at
from swapper.errors import ArgumentError
from swapper.extents.intervals import IntervalSet
from swapper.memory.region import AlignedRegion
from swapper.wrappers.base import BackendWrapper

Runs = npt.NDArray[np.uint32]
"""A snapshot: one row (first block, first slot, number) for each run of blocks in consecutive slots."""

_Part = tuple[int, memoryview, int]  # of a request: offset in the inner backend, memory, its address
_TRANSIENT = frozenset({None, errno.EINTR, errno.EAGAIN})  # not of the drive: the slots can be used again
_SHORT = "a transfer stayed short"
_MOST_BYTES = ALIGNMENT << 32  # numbers of slots and blocks have 32 bits, in memory and in snapshots, and slot + 1 too
_WINDOW_BLOCKS = 1 << 18  # blocks per step of snapshot(): 2 MiB for each of its temporary arrays of int64


class VersionedBackend(BackendWrapper):
    """Maps each block to a slot; see [Note: versions].

    Args:
        inner: Stores the slots. It must be larger than ``capacity_bytes``, for each kept snapshot by as many bytes as
            are written between two calls of :meth:`retain`.
        capacity_bytes: Size of the address space. Multiple of 4096.
    """

    def __init__(self, inner: IOBackend, capacity_bytes: int) -> None:
        super().__init__(inner)
        if capacity_bytes % ALIGNMENT or capacity_bytes > inner.capacity_bytes:
            raise ArgumentError(
                f"capacity_bytes must be a multiple of {ALIGNMENT} and at most {inner.capacity_bytes}, got {capacity_bytes}"
            )
        if inner.capacity_bytes >= _MOST_BYTES:  # a slot's number would be another one's, without a word
            raise ArgumentError(
                f"a durable volume has less than {_MOST_BYTES >> 40} TiB, got {inner.capacity_bytes} bytes. Keep fewer commits, "
                "or divide the states among several processes"
            )
        self.capacity_bytes = capacity_bytes
        self.block_bytes = ALIGNMENT
        self.boundary_bytes = 0  # transfers are cut here as the inner backend wants it
        self._num_slots = inner.capacity_bytes // ALIGNMENT
        self._lock = threading.RLock()  # guards all that follows
        # By block: its slot + 1, 0 if never written.
        self._slots = np.zeros(capacity_bytes // ALIGNMENT, dtype=np.uint32)
        self._is_kept = np.zeros(self._num_slots, dtype=np.bool_)  # by slot: a kept snapshot names it
        self._kept: Mapping[int, Runs] = {}
        self._taken = IntervalSet()  # slots of writes on their way, and of those that failed
        self._free = IntervalSet()  # slots that are neither taken, nor kept, nor in the present map
        self._free.add(0, self._num_slots)
        self._cursor = 0  # the slot behind the one that was taken last

    @staticmethod
    def memory_bytes(capacity_bytes: int, inner_bytes: int) -> int:
        """Return the peak memory of the map, in :meth:`retain`, without snapshots, which are small."""
        num_blocks, num_slots = -(-capacity_bytes // ALIGNMENT), -(-inner_bytes // ALIGNMENT)
        # Four bytes for an entry of _slots; one for an entry of _is_kept, and four for the temporary arrays of
        # _recount.
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
        """Return the present map; no write may be on its way."""
        rows: list[Runs] = []
        with self._lock:
            for low in range(0, self._slots.size, _WINDOW_BLOCKS):
                runs = _runs(self._slots[low : low + _WINDOW_BLOCKS])  # one that crosses a window becomes two rows
                rows.append((runs[runs[:, 1] > 0] + (low, -1, 0)).astype(np.uint32))
        return np.concatenate([np.zeros((0, 3), dtype=np.uint32), *rows])

    def retain(self, snapshots: Mapping[int, Runs]) -> None:
        """Keep the slots of these snapshots, by number, and free all others but those of the present."""
        for runs in snapshots.values():
            self._check(runs)
        with self._lock:
            self._kept = dict(snapshots)
            self._recount()

    def restore(self, runs: Runs) -> None:
        """Make a snapshot the present. No request may be on its way."""
        self._check(runs)
        with self._lock:
            self._slots[:] = 0
            for block, slot, number in runs.tolist():
                self._slots[block : block + number] = np.arange(slot + 1, slot + 1 + number, dtype=np.uint32)
            self._recount()

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
        # Changes between used and free alternate, with a used slot before the first and behind the last. Example:
        # is_used 1 0 0 1 0 gives edges 1 3 4 5: the free ranges [1, 3) and [4, 5).
        edges = np.flatnonzero(np.diff(np.concatenate([[True], is_used, [True]]).astype(np.int8)))
        self._free = IntervalSet()
        for start, stop in edges.reshape(-1, 2).tolist():
            self._free.add(start, stop)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _read(self, request: IORequest) -> None:
        first, stop = request.offset // ALIGNMENT, -(-(request.offset + len(request.memory)) // ALIGNMENT)
        with self._lock:
            runs = _runs(self._slots[first:stop])
        parts = []
        for block, slot, number in runs.tolist():
            low = max((first + block) * ALIGNMENT, request.offset) - request.offset
            high = min((first + block + number) * ALIGNMENT - request.offset, len(request.memory))
            if slot:
                within = (request.offset + low) % ALIGNMENT
                parts.append(((slot - 1) * ALIGNMENT + within, request.memory[low:high], request.address + low))
            else:  # never written: zeros, as in a new file
                request.memory[low:high] = bytes(high - low)
        self._move(Direction.READ, parts, len(request.memory), request.complete)

    def _write(self, request: IORequest) -> None:
        start, stop = request.offset, request.offset + len(request.memory)
        if not (start | stop) % ALIGNMENT:
            self._store(request, start // ALIGNMENT, request.memory, request.address)
            return
        # Blocks at the ends are not written whole: all blocks are read into other memory, and written from there with
        # the new bytes. No other request changes them meanwhile: the scheduler orders requests that share a block.
        first = start // ALIGNMENT
        blocks = AlignedRegion(-(-stop // ALIGNMENT) * ALIGNMENT - first * ALIGNMENT).array()
        address: int = blocks.__array_interface__["data"][0]

        def put(_: IORequest, read_bytes: int, error: OSError | None) -> None:
            if error is not None or read_bytes < blocks.size:
                request.complete(0, error or OSError(errno.EAGAIN, _SHORT))
                return
            within = start % ALIGNMENT
            blocks[within : within + stop - start] = np.frombuffer(request.memory, dtype=np.uint8)
            self._store(request, first, blocks.data, address)

        self._read(IORequest(Direction.READ, first * ALIGNMENT, blocks.data, address, put))

    def _store(self, request: IORequest, first: int, memory: memoryview, address: int) -> None:
        """Write ``memory`` to free slots, which become those of the blocks from ``first`` on; then end the request."""
        num_bytes = len(memory)
        with self._lock:
            ranges = self._allocate(num_bytes // ALIGNMENT)
        if ranges is None:
            message = (
                "no free slot: more was written since the last commit than the durable run has reserved space for, "
                "for example into frozen weights. To replace all weights (with a checkpoint, for example), start a "
                "durable run in a new directory and load them there first"
            )
            request.complete(0, OSError(errno.ENOSPC, message))
            return
        parts, begin = [], 0
        for low, high in ranges:
            end = begin + (high - low) * ALIGNMENT
            parts.append((low * ALIGNMENT, memory[begin:end], address + begin))
            begin = end
        del memory  # see _move(): the request may be over before this thread returns

        def then(written_bytes: int, error: OSError | None) -> None:
            if error is None and written_bytes < num_bytes:
                error = OSError(errno.EAGAIN, _SHORT)
            self._end_write(request, first, ranges, error)

        self._move(Direction.WRITE, parts, num_bytes, then)

    def _move(self, direction: Direction, parts: list[_Part], num_bytes: int, then: EndCallback) -> None:
        """Transfer parts of a request, and empty the list.

        ``num_bytes``: What ``then`` gets if all of them, or none at all, went well; else it gets 0.
        """
        batch = Batch(set(), num_bytes, then)
        requests = [
            IORequest(direction, offset + low, memory[low:high], address + low, batch.on_complete)
            for offset, memory, address in parts
            for low, high in split_at(offset, len(memory), self.inner.boundary_bytes)
        ]
        parts.clear()  # the request may be over before this thread returns: no view of its memory may be left then
        batch.submit(self.inner, requests)

    def _end_write(self, request: IORequest, first: int, ranges: list[tuple[int, int]], error: OSError | None) -> None:
        with self._lock:
            if error is None:
                # The map changes only now: a read that comes earlier returns the last completed write.
                slots = np.concatenate([np.arange(low + 1, high + 1, dtype=np.uint32) for low, high in ranges])
                present = self._slots[first : first + slots.size]
                released = present[present > 0]
                released = released[~self._is_kept[released - 1]]
                for _, slot, number in _runs(released).tolist():
                    self._free.add(slot - 1, slot - 1 + number)
                present[:] = slots
                for low, high in ranges:
                    self._taken.remove(low, high)
            elif error.errno in _TRANSIENT:  # other errors: the slots stay in _taken for good
                self._return_slots(ranges)
        request.complete(0 if error is not None else len(request.memory), error)

    def _allocate(self, number: int) -> list[tuple[int, int]] | None:
        """Take free slots, as ranges; None if there are not enough."""
        found: list[tuple[int, int]] = []
        while number:  # the first free range from the cursor on, then from the beginning
            piece = self._free.first_overlap(self._cursor, self._num_slots) or self._free.first_overlap(0, self._cursor)
            if piece is None:
                self._return_slots(found)
                return None
            low, high = piece[0], min(piece[1], piece[0] + number)
            self._free.remove(low, high)
            self._taken.add(low, high)
            found.append((low, high))
            number -= high - low
            self._cursor = high % self._num_slots
        return found

    def _return_slots(self, ranges: list[tuple[int, int]]) -> None:
        for low, high in ranges:
            self._taken.remove(low, high)
            self._free.add(low, high)


def _runs(slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """(place, first value, number) of each run in which values rise by one; zeros make runs of their own."""
    # [5, 6, 0, 0, 9] -> (0, 5, 2), (2, 0, 2), (4, 9, 1). Without zeros, values rise: places 2 and 4 begin a run, because
    # 0 is not 6 + 1, and 9 is not 0.
    values = slots.astype(np.int64)
    expected = values + (values > 0)
    places = np.concatenate([[0], (values[1:] != expected[:-1]).nonzero()[0] + 1])[: values.size]
    numbers = np.concatenate([places[1:], [values.size]])[: values.size] - places
    return np.array([places, values[places], numbers]).T
