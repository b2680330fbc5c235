"""Optimizer state, chunk by chunk: read into working memory, updated there, written back.

Knows chunks and bytes; must not know what an optimizer does with them.
"""

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
from infinity.units.layout import Chunk
from infinity.units.unit import Unit
from swapper import AlignedRegion, Extent, Handle, Priority, StagingBuffer, StagingExhaustedError, StagingPool, Swapper

_BUFFERS_FOR_OTHERS = 3
"""Are never read ahead into, so that nobody waits for what nobody opens."""
_TIMEOUT_SECONDS = 1.0
"""Until what was read ahead makes room for what is needed now, and has to be read again."""

NDArray = npt.NDArray[np.uint8]


def _nothing() -> None: ...


@dataclass
class _UnitRecords:
    names: tuple[str, ...]
    main_bytes: list[int]
    num_in_memory: int
    """Chunks, from the first on, whose records rest in memory."""
    memory: torch.Tensor | None
    extent: Extent | None
    offsets: list[int]
    """Of each record, in ``memory`` or in ``extent``."""
    valid_bytes: list[int]
    """Of each record in the extent, how many bytes from its beginning are stored; the rest is zero."""


@dataclass(eq=False)
class Lease:
    """A chunk in working memory, of which a part lies in a staging buffer, if only scratch; or none.

    Attributes:
        workspace: The working memory. It is gone after `write_back` and `discard`: what it sees of a flat buffer counts as a
            view.
        read: What brings the record; None if it is there.
        on_end: Called when it may change nothing more of what is stored.
        takes_memory: Whether it has working memory of its own: a chunk in memory, with its weights there, is worked on in
            place.
    """

    _staging_buffer: StagingBuffer | None
    workspace: ChunkBuffer
    read: Handle | None = None
    _store: Callable[[bool], Handle | None] | None = None
    takes_memory: bool = True
    on_end: Callable[[], None] = _nothing
    _writes: list[Handle] = field(default_factory=list)
    """Requests that use the working memory, and have not ended when they were last looked at."""
    _then: Callable[[], None] = _nothing

    def wait(self) -> None:
        """Return when the record is there."""
        if self.read is not None:
            self.read.wait()

    def write_back(
        self, others: Sequence[Handle], *, main_only: bool = False, then: Callable[[], None] = _nothing
    ) -> None:
        """Store the record; the working memory is free again when that and ``others`` are done.

        Args:
            others: requests that use the working memory, too.
            main_only: the states are blank, store what comes before them alone; the next `open` gives zeros for the states.
            then: called when the memory is free, from any thread.
        """
        self._writes, self._then = list(others), then
        own = None if self._store is None else self._store(main_only)
        if own is not None:
            self._writes.append(own)
        self.on_end()
        del self.workspace
        self._when_written()

    def _when_written(self, _: Handle | None = None) -> None:
        """Give the memory back if all requests are over, else look again when one more is: the last, as a rule, ends last."""
        while self._writes:
            if not self._writes[-1].is_finished:
                self._writes[-1].add_done_callback(self._when_written)
                return
            self._writes.pop()
        if self._staging_buffer is not None:
            self._staging_buffer.release()
        self._then()

    def discard(self) -> None:
        """Store nothing."""
        self.on_end()
        del self.workspace
        # Requests that were started with the staging buffer may not have ended: then it stays out of use until they have.
        if self._staging_buffer is not None:
            self._staging_buffer.release()


class PagedStateStore:
    """Records in extents of a swapper, worked on in the buffers of a staging pool, and records in memory, worked on in
    place."""

    is_on_device = False
    """Whether they rest in the memory of a GPU, and are worked on there."""

    def __init__(self, swapper: Swapper | None, staging_pool: StagingPool, record_format: ChunkFormat) -> None:
        """``swapper``: None if all records rest in memory."""
        self._swapper = swapper
        self._staging_pool = staging_pool
        self._format = record_format
        self._records: dict[int, _UnitRecords] = {}
        self._regions: list[AlignedRegion] = []
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Held by whoever begins to read ahead, and while what follows changes."""
        self._layouts: dict[tuple[int, int, tuple[str, ...]], ChunkBuffer] = {}
        """Staging buffer, elements of the chunk, names of states -> its working memory there: a buffer stays where it is."""
        self._ahead: dict[tuple[int, int], Lease] = {}
        """(unit index, chunk index) -> where its record is read to. Whoever opens the chunk gets it, so it is what is stored."""
        self._open: set[tuple[int, int]] = set()
        """(unit index, chunk index) of leases that may yet change what is stored."""

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str], numel_in_memory: int = 0) -> None:
        """Make room for the records of a unit, with per-element states ``names``.

        ``numel_in_memory``: chunks that end at this element or before have their records in host memory.
        """
        num_in_memory = sum(chunk.stop <= numel_in_memory for chunk in chunks)
        form = self._format
        sizes_in_memory = (form.record_bytes(chunk.numel, len(names)) for chunk in chunks[:num_in_memory])
        sizes_on_drive = (form.stored_bytes(chunk.numel, len(names)) for chunk in chunks[num_in_memory:])
        in_memory = list(itertools.accumulate(sizes_in_memory, initial=0))
        on_drive = list(itertools.accumulate(sizes_on_drive, initial=0))
        extent: Extent | None = None
        if on_drive[-1]:
            if self._swapper is None:
                raise RuntimeError(f"unit {unit.name} has records that rest nowhere")
            name_of = record_contents(chunks[num_in_memory:], on_drive, names, form)
            extent = self._swapper.allocate(on_drive[-1], f"optimizer state of {unit.name}", name_of=name_of)
        memory: torch.Tensor | None = None
        if num_in_memory:
            region = AlignedRegion(max(in_memory[-1], 1))  # zeros, and no memory before they are written
            self._regions.append(region)
            memory = torch.from_numpy(region.array())
        self._records[unit.index] = _UnitRecords(
            names=tuple(names),
            main_bytes=[form.main_bytes(chunk.numel) for chunk in chunks],
            num_in_memory=num_in_memory,
            memory=memory,
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
        """Bring a chunk's record into working memory; None when there is no free staging buffer and ``is_blocking`` is False.

        One that was read ahead is there already.

        Args:
            unit, chunk: which.
            is_blocking: wait for a staging buffer.
            weight: the chunk's model weights where they rest (compute dtype), to be worked on there.
            needs_scratch: whether the workspace must have room for a gradient.
            reads: False: the record is zeros, as nothing of what is stored is needed.
        """
        records, key = self._records[unit.index], (unit.index, chunk.index)
        with self._lock:
            self._open.add(key)
            lease = self._ahead.pop(key, None)
        try:
            if lease is not None and not reads:
                lease.discard()  # its staging buffer stays out of use until the read has ended
                lease = None
            if chunk.index < records.num_in_memory:
                lease = self._open_in_place(unit, chunk, weight, is_blocking=is_blocking, needs_scratch=needs_scratch)
                if lease is not None and not reads:
                    clear(lease.workspace.record)
            elif lease is None:
                staging_buffer = self._buffer_for(unit, is_blocking=is_blocking)
                lease = None if staging_buffer is None else self._begin(records, chunk, staging_buffer, reads=reads)
        except BaseException:
            self._open.discard(key)
            raise
        if lease is None:
            self._open.discard(key)
            return None
        lease.on_end = functools.partial(self._open.discard, key)
        if weight is not None and lease.workspace.weight is not weight:
            lease.workspace = lease.workspace.with_weight(weight)
        return lease

    def _begin(
        self, records: _UnitRecords, chunk: Chunk, staging_buffer: StagingBuffer, *, reads: bool = True
    ) -> Lease:
        """A lease of a record of the extent, whose read has begun."""
        layout = staging_buffer.index, chunk.stop - chunk.start, records.names
        try:
            workspace = self._layouts.get(layout)
            if workspace is None:
                workspace = self._layouts[layout] = self._format.lay_out(
                    staging_buffer.tensor, chunk.numel, records.names
                )
            record, read = workspace.raw_record, None
            valid_bytes = records.valid_bytes[chunk.index] if reads else 0
            if valid_bytes < record.size:
                record[valid_bytes:] = 0
            if valid_bytes and records.extent is not None and self._swapper is not None:
                target, offset = record[:valid_bytes], records.offsets[chunk.index]
                read = self._swapper.read(records.extent, target, offset=offset, priority=Priority.PREFETCH)
        except BaseException:
            staging_buffer.release()
            raise
        return Lease(staging_buffer, workspace, read, functools.partial(self._write, records, chunk.index, record))

    def _buffer_for(self, unit: Unit, *, is_blocking: bool) -> StagingBuffer | None:
        owner = f"optimizer state of {unit.name}"
        if not is_blocking:
            return self._staging_pool.try_lease(owner=owner)
        if self._ahead:
            with contextlib.suppress(
                StagingExhaustedError
            ):  # the others are being written, as a rule, and free when they are
                return self._staging_pool.lease(_TIMEOUT_SECONDS, owner=owner)
            with self._lock:
                if self._ahead:
                    self._ahead.popitem()[1].discard()
        return self._staging_pool.lease(owner=owner)

    def read_ahead(self, unit: Unit, chunk: Chunk) -> bool:
        """Read a record that is soon to be opened, if that takes no staging buffer that others may need; whether there was
        room."""
        records, key = self._records[unit.index], (unit.index, chunk.index)
        if chunk.index < records.num_in_memory:
            return True
        if key in self._open:
            return False
        with self._lock:
            if key in self._ahead or not records.valid_bytes[chunk.index]:
                return True  # there is nothing to be read
            if key in self._open or len(self._ahead) >= self._staging_pool.num_buffers - _BUFFERS_FOR_OTHERS:
                return False
            staging_buffer = self._staging_pool.try_lease(owner=f"optimizer state of {unit.name}")
            if staging_buffer is None:
                return False
            lease = self._begin(records, chunk, staging_buffer)
            if lease.read is None:
                lease.discard()
            else:
                self._ahead[key] = lease
            return True

    def drop_read_ahead(self) -> None:
        """Give back what was read ahead and has not been opened."""
        with self._lock:
            while self._ahead:
                self._ahead.popitem()[1].discard()

    def _open_in_place(
        self, unit: Unit, chunk: Chunk, weight: torch.Tensor | None, *, is_blocking: bool, needs_scratch: bool
    ) -> Lease | None:
        """A lease of a record in memory, with a staging buffer for what else there has to be."""
        records, staging_buffer = self._records[unit.index], None
        if records.memory is None:
            raise RuntimeError("the record is not in memory")
        if weight is None or needs_scratch:
            staging_buffer = self._buffer_for(unit, is_blocking=is_blocking)
            if staging_buffer is None:
                return None
        scratch = torch.empty(0, dtype=torch.uint8, device="cpu") if staging_buffer is None else staging_buffer.tensor
        offset = records.offsets[chunk.index]
        record = records.memory[offset : offset + self._format.record_bytes(chunk.numel, len(records.names))]
        workspace = self._format.over_scratch(record, chunk.numel, records.names, scratch, weight)
        return Lease(staging_buffer, workspace, takes_memory=staging_buffer is not None)

    def _write(self, records: _UnitRecords, index: int, record: NDArray, main_only: bool) -> Handle | None:
        if main_only:
            record = record[: records.main_bytes[index]]
        records.valid_bytes[index] = record.size
        if records.extent is None or self._swapper is None or not record.size:
            return None
        return self._swapper.write(records.extent, record, offset=records.offsets[index])

    def valid_bytes(self) -> dict[int, list[int]]:
        """By unit, how much of each record is stored; the rest is zero."""
        return {index: list(records.valid_bytes) for index, records in self._records.items()}

    def places(self) -> dict[int, int]:
        """By unit, where its extent begins, of those that have one."""
        return {i: records.extent.start for i, records in self._records.items() if records.extent is not None}

    def set_valid_bytes(self, valid_bytes: Mapping[int, list[int]]) -> None:
        """The extents hold other records, of which so much is stored. None may be open.

        Raises:
            ValueError: there are not such records.
        """
        for index, found in valid_bytes.items():
            present = self._records[index].valid_bytes
            if len(found) != len(present) or not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
                raise ValueError(f"the records of unit {index} are others")
        self.drop_read_ahead()
        for index, found in valid_bytes.items():
            self._records[index].valid_bytes[:] = found

    def close(self) -> None:
        """Give the memory back."""
        self._layouts.clear()
        for records in self._records.values():
            records.memory = None
        for region in self._regions:
            region.release()


def clear(memory: torch.Tensor) -> None:
    """Fill it with zeros: host memory in this thread alone, since torch's own wait for each other on a busy machine."""
    if memory.device.type == "cpu" and memory.numel():
        memory.view(torch.uint8).numpy()[:] = 0
    else:
        memory.zero_()


class ResidentStateStore:
    """Records that stay in the memory of a GPU: ``offload_optimizer.device`` "none". As `PagedStateStore` for others."""

    is_on_device = True

    def __init__(self, device: torch.device, record_format: ChunkFormat) -> None:
        self._device = device
        self._format = record_format
        self._records: dict[int, tuple[torch.Tensor, list[int], tuple[str, ...]]] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str], numel_in_memory: int = 0) -> None:
        offsets: list[int] = []
        total = 0
        for chunk in chunks:
            offsets.append(total)
            total += self._format.record_bytes(chunk.numel, len(names))
        memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
        self._records[unit.index] = (memory, offsets, tuple(names))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index][2]

    def read_ahead(self, unit: Unit, chunk: Chunk) -> bool:
        return True  # there is nothing to be read

    def drop_read_ahead(self) -> None: ...

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
        gradient = torch.empty(numel, dtype=torch.float32, device=self._device)
        if weight is None:
            weight = torch.empty(numel, dtype=self._format.weight_dtype, device=self._device)
        return Lease(None, self._format.over(record, numel, names, gradient, weight))


StateStore = PagedStateStore | ResidentStateStore
