"""Optimizer state, chunk by chunk: read into working memory, updated there, written back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from infinity.numerics.chunk_format import ChunkBuffer, ChunkFormat
from infinity.tiers.extent_labels import record_contents
from infinity.tiers.host_block import HostBlock
from infinity.tiers.user_copies import PutAside
from infinity.units.layout import Chunk
from infinity.units.unit import Unit
from swapper import Extent, Handle, Priority, StagingBuffer, StagingExhaustedError, StagingPool, Swapper

# Staging buffers that reading ahead leaves free: one chunk being read, one updated, one written. A record that is read
# ahead may be opened late or never, and its buffer stays in use until then. With none left, an update would wait for
# itself.
_BUFFERS_FOR_OTHERS = 3
# An update that finds no free buffer waits this long for one that is being written. Only then a record that was read
# ahead is given up, and read again later. Without the wait, 3 % of a step's reads on two ranks were second reads.
_TIMEOUT_SECONDS = 1.0

NDArray = npt.NDArray[np.uint8]


def _nothing() -> None: ...


@dataclass
class _UnitRecords:
    owner: str
    """What the staging pool calls whoever holds a buffer for one of them."""
    names: tuple[str, ...]
    main_bytes: list[int]
    num_in_memory: int
    """The first so many chunks have their records in host memory, the others in the extent."""
    memory: HostBlock | None
    """None if there are no such chunks, or an optimizer without states keeps nothing of them."""
    extent: Extent | None
    offsets: list[int]
    """First byte of each record, in ``memory`` or in ``extent``."""
    valid_bytes: list[int]
    """Bytes that are stored of each record in the extent, from its beginning; the rest is zero."""
    # Worked example, a record of 4096 bytes of remainders and 2 * 8192 of states: 0 after `allocate` (nothing to read),
    # 4096 after `write_back(main_only=True)` (states are still blank and are not read), 20480 after an update.


@dataclass(eq=False)
class Lease:
    """A chunk in working memory. It ends with `write_back` or `discard`.

    Attributes:
        workspace: The working memory: in a staging buffer, in place, or partly each.
        read: The read of the record; None if it is in memory already.
        on_end: Called when this lease can no longer change what is stored.
        takes_memory: Whether it has a staging buffer. A chunk whose record and weights are in memory needs none.
    """

    _staging_buffer: StagingBuffer | None
    workspace: ChunkBuffer
    read: Handle | None = None
    _stored: tuple[Swapper, Extent, _UnitRecords, int, NDArray] | None = None
    """The swapper, the extent and the records among which it is stored, its index there, and its bytes in the staging
    buffer. None if it is updated where it is stored, or has no bytes."""
    takes_memory: bool = True
    on_end: Callable[[], None] = _nothing
    _writes: list[Handle] = field(default_factory=list)
    """Requests beside the write of the record that use the working memory and may not have ended."""
    _then: Callable[[], None] = _nothing

    def wait(self) -> None:
        """Return when the record has been read."""
        if self.read is not None:
            self.read.wait()

    def write_back(
        self, others: Sequence[Handle], *, main_only: bool = False, then: Callable[[], None] = _nothing
    ) -> None:
        """Store the record. The working memory is free when that and ``others`` are done. Waits for nothing.

        Args:
            others: other requests that use the working memory.
            main_only: the states are blank: store only the bytes before them. The next `open` returns zeros for the
                states.
            then: called when the memory is free, from any thread.
        """
        self._writes, self._then = list(others), then
        is_writing = False
        if self._stored is not None:
            swapper, extent, records, index, record = self._stored
            if main_only:
                record = record[: records.main_bytes[index]]
            # Set when the write is submitted: a later read is ordered behind it, and raises if the write has failed.
            records.valid_bytes[index] = record.size
            is_writing = record.size > 0
            if is_writing:
                swapper.write(extent, record, offset=records.offsets[index], then=self._when_written)
        # From here on the chunk may be opened again. A read of it is ordered behind the write: the swapper runs
        # operations on overlapping bytes of an extent in the order in which they were submitted.
        self.on_end()
        # It may hold views of the unit's flat buffer, which could not be evicted while they are alive.
        del self.workspace
        if not is_writing:
            self._when_written()

    def _when_written(self, _: Handle | None = None) -> None:
        """The record is written. Release the staging buffer if other requests are over, too, else wait for the last."""
        # As a rule they are: they were submitted before.
        while self._writes:
            if not self._writes[-1].is_finished:
                self._writes[-1].add_done_callback(self._when_written)
                return
            self._writes.pop()
        staging_buffer, self._staging_buffer = self._staging_buffer, None
        if staging_buffer is not None:  # `discard` releases it if an interrupt comes within `write_back`
            staging_buffer.release()
        self._then()

    def discard(self) -> None:
        """End the lease without storing anything. Does nothing if it has ended."""
        if not hasattr(self, "workspace"):  # an interrupt came between its end and that of the caller's block
            return
        self.on_end()
        del self.workspace
        # A read into the buffer may be under way: the staging pool then leases it to nobody until the read has ended.
        staging_buffer, self._staging_buffer = self._staging_buffer, None
        if staging_buffer is not None:
            staging_buffer.release()


class PagedStateStore:
    """Records on drives, updated in staging buffers, and records in host memory, updated in place.

    Update workers and the training thread call it. `open` may wait for a staging buffer; nothing else waits.
    """

    is_on_device = False
    """Whether records are stored in GPU memory and updated there."""

    def __init__(self, swapper: Swapper | None, staging_pool: StagingPool, record_format: ChunkFormat) -> None:
        """``swapper``: None if all records are in memory."""
        self.free_buffers: Sequence[int] = staging_pool.free
        """Staging buffers that can be leased now."""
        self._swapper = swapper
        self._staging_pool = staging_pool
        self._format = record_format
        self._records: dict[int, _UnitRecords] = {}
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Guards `_ahead`. The staging pool's own lock is taken inside of it, never the other way round."""
        self._layouts: dict[tuple[int, int, tuple[str, ...]], ChunkBuffer] = {}
        """(staging buffer, elements of the chunk, state names) -> views of the buffer: made once, as buffers move
        in `release_memory` only."""
        self._ahead: dict[tuple[int, int], Lease] = {}
        """(unit index, chunk index) -> lease whose read was started ahead of need. The next `open` of the chunk returns
        it."""
        self._open: set[tuple[int, int]] = set()
        """(unit index, chunk index) of leases that may still change the record: such a record is not read ahead."""

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str], numel_in_memory: int = 0) -> None:
        """Allocate the records of a unit, with per-element states ``names``.

        ``numel_in_memory``: chunks that end at this element or before have their records in host memory.
        """
        # `accumulate` gives the start of each record, and the total at the end: sizes 20480, 20480, 8192 -> 0, 20480,
        # 40960, 49152. In memory records follow each other closely, on a drive each fills whole blocks
        # (`stored_bytes`).
        num_in_memory = sum(chunk.stop <= numel_in_memory for chunk in chunks)
        form = self._format
        sizes_in_memory = (form.record_bytes(chunk.numel, len(names)) for chunk in chunks[:num_in_memory])
        sizes_on_drive = (form.stored_bytes(chunk.numel, len(names)) for chunk in chunks[num_in_memory:])
        in_memory = list(itertools.accumulate(sizes_in_memory, initial=0))
        on_drive = list(itertools.accumulate(sizes_on_drive, initial=0))
        owner = f"optimizer state of {unit.name}"
        extent: Extent | None = None
        if on_drive[-1]:
            if self._swapper is None:
                raise RuntimeError(f"unit {unit.name} has records that rest nowhere")
            name_of = record_contents(chunks[num_in_memory:], on_drive, names, form)
            extent = self._swapper.allocate(on_drive[-1], owner, name_of=name_of)
        self._records[unit.index] = _UnitRecords(
            owner=owner,
            names=tuple(names),
            main_bytes=[form.main_bytes(chunk.numel) for chunk in chunks],
            num_in_memory=num_in_memory,
            memory=HostBlock(in_memory[-1]) if in_memory[-1] else None,  # initial states are zeros
            extent=extent,
            offsets=[*in_memory[:-1], *on_drive[:-1]],
            valid_bytes=[0] * len(chunks),
        )

    def names_of(self, unit: Unit) -> Sequence[str]:
        """The unit's per-element state names."""
        return self._records[unit.index].names

    def open(
        self,
        unit: Unit,
        chunk: Chunk,
        *,
        is_blocking: bool,
        weight: torch.Tensor | None = None,
        needs_scratch: bool = True,
        reads: bool = True,
    ) -> Lease | None:
        """Start to read a chunk's record into working memory, or return the lease of a read that was started ahead.

        Args:
            unit, chunk: which record.
            is_blocking: wait for a staging buffer. Otherwise the result is None if there is none.
            weight: the chunk's model weights (1-D, compute dtype) where they are stored, to be updated in place.
            needs_scratch: whether the workspace must have room for a gradient.
            reads: False: fill the record with zeros, as the caller replaces all of it.
        """
        records, key = self._records[unit.index], (unit.index, chunk.index)
        with self._lock:
            # In one step with the pop: `read_ahead` could otherwise start a second read of this record between the two.
            self._open.add(key)
            lease = self._ahead.pop(key, None)
        try:
            if lease is not None and not reads:
                lease.discard()  # the read may still fill its buffer, so another one is leased below
                lease = None
            if chunk.index < records.num_in_memory:
                lease = self._open_in_place(unit, chunk, weight, is_blocking=is_blocking, needs_scratch=needs_scratch)
                if lease is not None and not reads:
                    clear(lease.workspace.record)
            elif lease is None:
                staging_buffer = self._staging_pool.try_lease(owner=records.owner) if self.free_buffers else None
                if staging_buffer is None and is_blocking:
                    staging_buffer = self._lease_buffer(records, is_blocking=True)
                if staging_buffer is not None:
                    lease = self._begin(records, chunk, staging_buffer, reads=reads)
        except BaseException:
            self._open.discard(key)
            raise
        if lease is None:
            self._open.discard(key)
            return None
        lease.on_end = functools.partial(self._open.discard, key)  # a single operation of a set: it needs no lock
        if weight is not None and lease.workspace.weight is not weight:
            lease.workspace = lease.workspace.with_weight(weight)
        return lease

    def _begin(self, records: _UnitRecords, chunk: Chunk, staging_buffer: StagingBuffer, *, reads: bool) -> Lease:
        """Start to read a record of the extent into ``staging_buffer``, which this lease owns from now on."""
        layout = staging_buffer.index, chunk.stop - chunk.start, records.names
        extent, swapper = records.extent, self._swapper
        try:
            workspace = self._layouts.get(layout)
            if workspace is None:
                memory = self._staging_pool.memory_of(staging_buffer.index)
                workspace = self._layouts[layout] = self._format.lay_out(memory, chunk.numel, records.names)
            record = workspace.raw_record
            valid_bytes = records.valid_bytes[chunk.index] if reads else 0
            # The read brings only what was stored. Everything behind it, states that are still blank, has to be zeros.
            if valid_bytes < record.size:
                record[valid_bytes:] = 0
            if extent is None or swapper is None:
                return Lease(staging_buffer, workspace)
            lease = Lease(staging_buffer, workspace, None, (swapper, extent, records, chunk.index, record))
            if valid_bytes:
                target, offset = record[:valid_bytes], records.offsets[chunk.index]
                lease.read = swapper.read(extent, target, offset=offset, priority=Priority.PREFETCH)
            return lease
        except BaseException:
            staging_buffer.release()
            raise

    def _lease_buffer(self, records: _UnitRecords, *, is_blocking: bool) -> StagingBuffer | None:
        found = self._staging_pool.try_lease(owner=records.owner) if self.free_buffers else None
        if found is not None or not is_blocking:
            return found
        if self._ahead:
            # As a rule the other buffers are being written, and are free in a moment.
            with contextlib.suppress(StagingExhaustedError):
                return self._staging_pool.lease(_TIMEOUT_SECONDS, owner=records.owner)
            with self._lock:
                if self._ahead:
                    # The youngest entry: it will be needed last.
                    self._ahead.popitem()[1].discard()
        return self._staging_pool.lease(owner=records.owner)

    def read_ahead(self, unit: Unit, chunk: Chunk) -> bool:
        """Start to read a record that will be opened soon, if enough staging buffers are left.

        Returns False if it has to be tried again later.
        """
        records, key = self._records[unit.index], (unit.index, chunk.index)
        if chunk.index < records.num_in_memory:
            return True
        if key in self._open:  # looked at again below, under the lock
            return False
        with self._lock:
            if key in self._ahead or not records.valid_bytes[chunk.index]:
                return True  # it is being read, or nothing is stored yet
            if key in self._open or len(self._ahead) >= self._staging_pool.num_buffers - _BUFFERS_FOR_OTHERS:
                return False
            staging_buffer = self._staging_pool.try_lease(owner=records.owner)
            if staging_buffer is None:
                return False
            lease = self._begin(records, chunk, staging_buffer, reads=True)
            if lease.read is None:
                lease.discard()
            else:
                self._ahead[key] = lease
            return True

    def drop_read_ahead(self) -> None:
        """Release what was read ahead and has not been opened."""
        with self._lock:
            while self._ahead:
                self._ahead.popitem()[1].discard()

    def _open_in_place(
        self, unit: Unit, chunk: Chunk, weight: torch.Tensor | None, *, is_blocking: bool, needs_scratch: bool
    ) -> Lease | None:
        """A lease of a record in host memory. A staging buffer holds the gradient or the weights, if they need
        memory."""
        records, staging_buffer = self._records[unit.index], None
        if weight is None or needs_scratch:
            staging_buffer = self._lease_buffer(records, is_blocking=is_blocking)
            if staging_buffer is None:
                return None
        # Empty scratch gives an empty gradient: allowed, since the weight has memory and no gradient is needed.
        scratch = torch.empty(0, dtype=torch.uint8, device="cpu") if staging_buffer is None else staging_buffer.tensor
        offset = records.offsets[chunk.index]
        memory = torch.empty(0, dtype=torch.uint8, device="cpu") if records.memory is None else records.memory.tensor
        record = memory[offset : offset + self._format.record_bytes(chunk.numel, len(records.names))]
        workspace = self._format.over_scratch(record, chunk.numel, records.names, scratch, weight)
        return Lease(staging_buffer, workspace, takes_memory=staging_buffer is not None)

    def valid_bytes(self) -> dict[int, list[int]]:
        """By unit index, the stored bytes of each record. A durable run saves them with its commits."""
        return {index: list(records.valid_bytes) for index, records in self._records.items()}

    def places(self) -> dict[int, int]:
        """Unit index -> the first byte of its records in the volume, for units with records on NVMe."""
        return {i: records.extent.start for i, records in self._records.items() if records.extent is not None}

    def set_valid_bytes(self, valid_bytes: Mapping[int, list[int]]) -> None:
        """Replace the counts after the extents' contents were replaced. No lease may be open.

        Raises:
            ValueError: the counts are not those of these records.
        """
        for index, found in valid_bytes.items():
            present = self._records[index].valid_bytes
            # The counts come from a file: types and range are checked before they are used as offsets.
            if len(found) != len(present) or not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
                raise ValueError(f"the records of unit {index} are others")
        self.drop_read_ahead()
        for index, found in valid_bytes.items():
            self._records[index].valid_bytes[:] = found

    def release_memory(self, put_aside: PutAside) -> None:
        """Move what rests in memory elsewhere until `take_memory_back`, as far as ``put_aside`` takes it. Nothing is open."""
        self.drop_read_ahead()
        self._layouts.clear()  # they look at staging buffers, whose memory is released as well
        for block in self._blocks():
            block.release_memory(put_aside)

    def take_memory_back(self) -> None:
        """The counterpart of `release_memory`."""
        for block in self._blocks():
            block.take_memory_back()

    def _blocks(self) -> list[HostBlock]:
        return [records.memory for records in self._records.values() if records.memory is not None]

    def close(self) -> None:
        """Release all memory."""
        self._layouts.clear()  # first: views of memory that is released below
        for block in self._blocks():
            block.release()


def clear(memory: torch.Tensor) -> None:
    """Fill ``memory`` with zeros."""
    # By NumPy, on the calling thread: torch's fill would use all its threads, and they wait for each other at its end.
    if memory.device.type == "cpu" and memory.numel():
        memory.view(torch.uint8).numpy()[:] = 0
    else:
        memory.zero_()


class ResidentStateStore:
    """Records in the memory of a GPU: ``offload_optimizer.device`` "none". Same interface as `PagedStateStore`."""

    is_on_device = True
    free_buffers: Sequence[int] = ()

    def __init__(self, device: torch.device, record_format: ChunkFormat) -> None:
        self._device = device
        self._format = record_format
        self._records: dict[int, tuple[torch.Tensor, list[int], tuple[str, ...]]] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str], numel_in_memory: int = 0) -> None:
        sizes = (self._format.record_bytes(chunk.numel, len(names)) for chunk in chunks)
        *offsets, total = itertools.accumulate(sizes, initial=0)
        memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
        self._records[unit.index] = (memory, offsets, tuple(names))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index][2]

    def read_ahead(self, unit: Unit, chunk: Chunk) -> bool:
        return True  # there is nothing to be read

    def drop_read_ahead(self) -> None: ...

    def release_memory(self, put_aside: PutAside) -> None:
        for index, (memory, offsets, names) in self._records.items():
            aside = put_aside(memory) if memory.device.type == self._device.type else None
            if aside is not None:
                self._records[index] = (aside, offsets, names)

    def take_memory_back(self) -> None:
        for index, (aside, offsets, names) in self._records.items():
            self._records[index] = (aside.to(self._device), offsets, names)

    def close(self) -> None:
        self._records.clear()

    def open(
        self,
        unit: Unit,
        chunk: Chunk,
        *,
        is_blocking: bool,
        weight: torch.Tensor | None = None,
        needs_scratch: bool = True,
        reads: bool = True,
    ) -> Lease | None:
        memory, offsets, names = self._records[unit.index]
        numel = chunk.numel
        offset = offsets[chunk.index]
        record = memory[offset : offset + self._format.record_bytes(numel, len(names))]
        if not reads:
            record.zero_()
        # From the caching allocator, on the stream of the update: freed with the lease, and reused in stream order.
        gradient = torch.empty(numel, dtype=torch.float32, device=self._device)
        if weight is None:
            weight = torch.empty(numel, dtype=self._format.weight_dtype, device=self._device)
        return Lease(None, self._format.over(record, numel, names, gradient, weight))


StateStore = PagedStateStore | ResidentStateStore
