"""Optimizer state, chunk by chunk: read into working memory, updated there, written back.

Knows chunks and bytes; must not know what an optimizer does with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.contents import record_contents
from infinity.layout import Chunk
from infinity.unit import Unit
from infinity.workspace import RecordFormat, Workspace
from swapper import Extent, Handle, Page, Priority, StagingArena, Swapper


class Lease(Protocol):
    """A chunk in working memory."""

    @property
    def workspace(self) -> Workspace: ...

    def wait(self) -> None:
        """Return when the record is there."""
        ...

    def write_back(self, others: Sequence[Handle], *, main_only: bool = False) -> None:
        """Store the record; the working memory is free again when that and ``others`` are done.

        ``main_only``: the states are blank, store what comes before them alone; the next `open` gives zeros for the states.
        """
        ...

    def discard(self) -> None:
        """Store nothing."""
        ...


class RecordStore(Protocol):
    """All records of one tier."""

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        """Make room for the records of a unit, with per-element states ``names``."""
        ...

    def names_of(self, unit: Unit) -> Sequence[str]:
        """The unit's per-element state names."""
        ...

    def open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> Lease | None:
        """Bring a chunk's record into working memory; None when there is no free page and ``is_blocking`` is False."""
        ...


@dataclass
class _UnitRecords:
    extent: Extent | None
    offsets: list[int]
    main_bytes: list[int]
    names: tuple[str, ...]
    valid_bytes: list[int]
    """Of each record, how many bytes from its beginning are stored; the rest is zero."""


class _PagedLease:
    def __init__(
        self, page: Page, workspace: Workspace, read: Handle | None, swapper: Swapper, records: _UnitRecords, index: int
    ) -> None:
        self._page = page
        self.workspace = workspace
        self._read = read
        self._swapper = swapper
        self._records = records
        self._index = index
        self._remaining = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        if self._read is not None:
            self._read.wait()

    def write_back(self, others: Sequence[Handle], *, main_only: bool = False) -> None:
        handles = list(others)
        record = self.workspace.record
        records = self._records
        if main_only:
            record = record[: records.main_bytes[self._index]]
        if records.extent is not None and record.numel():
            handles.append(self._swapper.write(records.extent, record, offset=records.offsets[self._index]))
        records.valid_bytes[self._index] = record.numel()
        self._remaining = len(handles) + 1
        for handle in handles:
            handle.add_done_callback(self._one_is_done)
        self._one_is_done(None)

    def _one_is_done(self, _: Handle | None) -> None:
        with self._lock:
            self._remaining -= 1
            is_last = self._remaining == 0
        if is_last:
            self._page.release()

    def discard(self) -> None:
        try:
            self.wait()
        finally:
            self._page.release()


class PagedRecords:
    """Records in extents of a swapper (NVMe or host RAM), worked on in the pages of an arena."""

    def __init__(self, swapper: Swapper, arena: StagingArena, record_format: RecordFormat) -> None:
        self.swapper = swapper
        self._arena = arena
        self._format = record_format
        self._records: dict[int, _UnitRecords] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        offsets: list[int] = []
        total = 0
        for chunk in chunks:
            offsets.append(total)
            total += self._format.record_bytes(chunk.numel, len(names))
        name_of = record_contents(chunks, [*offsets, total], names)
        extent = self.swapper.allocate(total, f"optimizer state of {unit.name}", name_of=name_of) if total else None
        main_bytes = [self._format.main_bytes(chunk.numel) for chunk in chunks]
        self._records[unit.index] = _UnitRecords(extent, offsets, main_bytes, tuple(names), [0] * len(chunks))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index].names

    def open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> Lease | None:
        records = self._records[unit.index]
        owner = f"optimizer state of {unit.name}"
        page = self._arena.lease(owner=owner) if is_blocking else self._arena.try_lease(owner=owner)
        if page is None:
            return None
        workspace = self._format.lay_out(page.tensor, chunk.numel, records.names)
        valid_bytes = records.valid_bytes[chunk.index]
        read: Handle | None = None
        try:
            workspace.record[valid_bytes:].zero_()
            if valid_bytes and records.extent is not None:
                read = self.swapper.read(
                    records.extent,
                    workspace.record[:valid_bytes],
                    offset=records.offsets[chunk.index],
                    priority=Priority.PREFETCH,
                )
        except BaseException:
            page.release()
            raise
        return _PagedLease(page, workspace, read, self.swapper, records, chunk.index)


class _ResidentLease:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def wait(self) -> None: ...

    def write_back(self, others: Sequence[Handle], *, main_only: bool = False) -> None:
        for handle in others:
            handle.wait()

    def discard(self) -> None: ...


class ResidentRecords:
    """Records that stay in memory on the compute device: ``offload_optimizer.device`` "none"."""

    def __init__(self, device: torch.device, record_format: RecordFormat) -> None:
        self._device = device
        self._format = record_format
        self._records: dict[int, tuple[torch.Tensor, list[int], tuple[str, ...]]] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        offsets: list[int] = []
        total = 0
        for chunk in chunks:
            offsets.append(total)
            total += self._format.record_bytes(chunk.numel, len(names))
        memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
        self._records[unit.index] = (memory, offsets, tuple(names))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index][2]

    def open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> Lease | None:
        memory, offsets, names = self._records[unit.index]
        numel = chunk.numel
        offset = offsets[chunk.index]
        record = memory[offset : offset + self._format.record_bytes(numel, len(names))]
        gradient = torch.empty(numel, dtype=torch.float32, device=self._device)
        weight = torch.empty(numel, dtype=self._format.weight_dtype, device=self._device)
        return _ResidentLease(self._format.over(record, numel, names, gradient, weight))
