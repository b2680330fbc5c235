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
from swapper import AlignedRegion, ArenaExhaustedError, Extent, Handle, Page, Priority, StagingArena, Swapper

_PAGES_FOR_OTHERS = 3
"""Are never read ahead into, so that nobody waits for what nobody opens."""
_PATIENCE_SECONDS = 1.0
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
    """A chunk in working memory, of which a part lies in a page, if only scratch; or none."""

    _page: Page | None
    _workspace: ChunkBuffer | None
    _read: Handle | None = None
    _store: Callable[[bool], Handle | None] | None = None
    _end: Callable[[], None] = _nothing
    takes_memory: bool = True
    """Whether it has working memory of its own: a chunk in memory, with its weights there, is worked on in place."""
    _remaining: list[None] = field(default_factory=list)
    """One entry for each request but the last that has not ended: to take one out is a single step, in any thread."""
    _then: Callable[[], None] = _nothing

    @property
    def workspace(self) -> ChunkBuffer:
        """The working memory. It is gone after `write_back` and `discard`: what it sees of a flat buffer counts as a view."""
        if self._workspace is None:
            raise RuntimeError("the lease has ended")
        return self._workspace

    def wait(self) -> None:
        """Return when the record is there."""
        if self._read is not None:
            self._read.wait()

    def write_back(
        self, others: Sequence[Handle], *, main_only: bool = False, then: Callable[[], None] = _nothing
    ) -> None:
        """Store the record; the working memory is free again when that and ``others`` are done.

        Args:
            others: requests that use the working memory, too.
            main_only: the states are blank, store what comes before them alone; the next `open` gives zeros for the states.
            then: called when the memory is free, from any thread.
        """
        handles = list(others)
        self._then = then
        own = None if self._store is None else self._store(main_only)
        self._end()
        self._workspace = None
        if own is not None:
            handles.append(own)
        if not handles:
            self._release()
            then()
        self._remaining += [None] * (len(handles) - 1)
        for handle in handles:
            handle.add_done_callback(self._one_is_done)

    def _one_is_done(self, _: Handle) -> None:
        try:
            self._remaining.pop()
        except IndexError:  # it was the last
            self._release()
            self._then()

    def discard(self) -> None:
        """Store nothing."""
        self._end()
        self._workspace = None
        self._release()

    def _release(self) -> None:
        # Requests that were started with the page, of this record or of others, may not have ended: then it stays out of
        # use until they have.
        page, self._page = self._page, None
        if page is not None:
            page.release()


class PagedStateStore:
    """Records in extents of a swapper, worked on in the pages of an arena, and records in memory, worked on in place."""

    is_on_device = False
    """Whether they rest in the memory of a GPU, and are worked on there."""

    def __init__(self, swapper: Swapper | None, arena: StagingArena, record_format: ChunkFormat) -> None:
        """``swapper``: None if all records rest in memory."""
        self._swapper = swapper
        self._arena = arena
        self._format = record_format
        self._records: dict[int, _UnitRecords] = {}
        self._regions: list[AlignedRegion] = []
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Held by whoever begins to read ahead, and while what follows changes."""
        self._layouts: dict[tuple[int, int, tuple[str, ...]], tuple[ChunkBuffer, NDArray]] = {}
        """Page, elements of the chunk, and names of states -> its working memory there, and the record as bytes."""
        self._ahead: dict[tuple[int, int], tuple[Page, Handle, ChunkBuffer, NDArray]] = {}
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
        """Bring a chunk's record into working memory; None when there is no free page and ``is_blocking`` is False.

        One that was read ahead is there already.

        Args:
            unit, chunk: which.
            is_blocking: wait for a page.
            weight: the chunk's model weights where they rest (compute dtype), to be worked on there.
            needs_scratch: whether the workspace must have room for a gradient.
            reads: False: the record is zeros, as nothing of what is stored is needed.
        """
        records, key = self._records[unit.index], (unit.index, chunk.index)
        is_in_memory = chunk.index < records.num_in_memory
        with self._lock:
            self._open.add(key)
            page, read, workspace, record = self._ahead.pop(key, (None, None, None, None))
        end = functools.partial(self._open.discard, key)
        try:
            if page is not None and not reads:
                page.release()  # and stays out of use until the read has ended
                page = read = workspace = None
            if page is None and (not is_in_memory or weight is None or needs_scratch):
                page = self._page_for(unit, is_blocking=is_blocking)
                if page is None:
                    end()
                    return None
            if page is None or is_in_memory:
                scratch = torch.empty(0, dtype=torch.uint8, device="cpu") if page is None else page.tensor
                workspace = self._in_place(records, chunk, scratch, weight)
                if not reads:
                    clear(workspace.record)
                return Lease(page, workspace, _end=end, takes_memory=page is not None)
            if workspace is None or record is None:
                workspace, record = self._laid_out(page, chunk, records)
            if weight is not None:
                workspace = workspace.with_weight(weight)
            if not reads:
                record[:] = 0
            elif read is None:
                read = self._read(records, chunk.index, record)
        except BaseException:
            end()
            if page is not None:
                page.release()
            raise
        return Lease(page, workspace, read, functools.partial(self._write, records, chunk.index, record), end)

    def _laid_out(self, page: Page, chunk: Chunk, records: _UnitRecords) -> tuple[ChunkBuffer, NDArray]:
        """A chunk's working memory in a page, and its record as bytes. Pages stay where they are, and chunks are of few sizes."""
        key = page.index, chunk.stop - chunk.start, records.names
        found = self._layouts.get(key)
        if found is None:
            workspace = self._format.lay_out(page.tensor, chunk.numel, records.names)
            found = self._layouts[key] = workspace, workspace.record.numpy()
        return found

    def _page_for(self, unit: Unit, *, is_blocking: bool) -> Page | None:
        owner = f"optimizer state of {unit.name}"
        if not is_blocking:
            return self._arena.try_lease(owner=owner)
        if self._ahead:
            with contextlib.suppress(
                ArenaExhaustedError
            ):  # the others are being written, as a rule, and free when they are
                return self._arena.lease(_PATIENCE_SECONDS, owner=owner)
            with self._lock:
                if self._ahead:
                    self._ahead.popitem()[1][0].release()
        return self._arena.lease(owner=owner)

    def read_ahead(self, unit: Unit, chunk: Chunk) -> bool:
        """Read a record that is soon to be opened, if that takes no page that others may need; whether there was room."""
        records, key = self._records[unit.index], (unit.index, chunk.index)
        if chunk.index < records.num_in_memory:
            return True
        if key in self._open:
            return False
        with self._lock:
            if key in self._ahead or not records.valid_bytes[chunk.index]:
                return True  # there is nothing to be read
            if key in self._open or len(self._ahead) >= self._arena.num_pages - _PAGES_FOR_OTHERS:
                return False
            page = self._arena.try_lease(owner=f"optimizer state of {unit.name}")
            if page is None:
                return False
            try:
                workspace, record = self._laid_out(page, chunk, records)
                read = self._read(records, chunk.index, record)
            except BaseException:
                page.release()
                raise
            if read is None:
                page.release()
            else:
                self._ahead[key] = page, read, workspace, record
            return True

    def forget_ahead(self) -> None:
        """Give back what was read ahead and has not been opened."""
        with self._lock:
            while self._ahead:
                self._ahead.popitem()[1][0].release()

    def _in_place(
        self, records: _UnitRecords, chunk: Chunk, scratch: torch.Tensor, weight: torch.Tensor | None
    ) -> ChunkBuffer:
        if records.memory is None:
            raise RuntimeError("the record is not in memory")
        offset = records.offsets[chunk.index]
        record = records.memory[offset : offset + self._format.record_bytes(chunk.numel, len(records.names))]
        return self._format.over_scratch(record, chunk.numel, records.names, scratch, weight)

    def _read(self, records: _UnitRecords, index: int, record: NDArray) -> Handle | None:
        valid_bytes = records.valid_bytes[index]
        if valid_bytes < record.size:
            record[valid_bytes:] = 0
        if not valid_bytes or records.extent is None or self._swapper is None:
            return None
        return self._swapper.read(
            records.extent, record[:valid_bytes], offset=records.offsets[index], priority=Priority.PREFETCH
        )

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
        self.forget_ahead()
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

    def forget_ahead(self) -> None: ...

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
