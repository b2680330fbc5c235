"""Optimizer state, chunk by chunk: read into working memory, updated there, written back.

Knows chunks and bytes; must not know what an optimizer does with them.

    one chunk's working memory, n elements (a page, or resident memory)
    | main weight: 4n | state 0: 4n | state 1: 4n | ... | gradient: 4n | model weight: n * itemsize |
    |<----------- record as stored --------------------->|
    With fp32 compute the model weight is the main weight: it is stored with the weights, and the record begins after it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.contents import record_contents
from infinity.layout import Chunk
from infinity.unit import Unit
from swapper import Extent, Handle, Page, Priority, StagingArena, Swapper

_FP32_BYTES = 4


@dataclass(frozen=True)
class Workspace:
    """Views of one chunk's working memory, each 1-D with ``chunk.numel`` elements."""

    main: torch.Tensor
    """fp32 main weight."""
    states: Mapping[str, torch.Tensor]
    """fp32 optimizer state by name."""
    gradient: torch.Tensor
    """fp32 scratch for the gradient."""
    weight: torch.Tensor
    """Model weight in the compute dtype; with fp32 compute it is ``main`` itself."""
    record: torch.Tensor
    """uint8 view of what is stored."""


def workspace_bytes(numel: int, num_states: int, weight_itemsize: int) -> int:
    """Bytes of the working memory for one chunk of ``numel`` elements."""
    return numel * (_FP32_BYTES * (2 + num_states) + (weight_itemsize if weight_itemsize != _FP32_BYTES else 0))


def record_bytes(numel: int, num_states: int, weight_itemsize: int) -> int:
    """Bytes stored for ``numel`` elements."""
    return numel * _FP32_BYTES * (num_states + (1 if weight_itemsize != _FP32_BYTES else 0))


def lay_out(memory: torch.Tensor, numel: int, names: Sequence[str], weight_dtype: torch.dtype) -> Workspace:
    """Views of ``memory`` (uint8, 4096-aligned, on any device) as the working memory of a chunk."""
    fp32 = memory[: numel * _FP32_BYTES * (2 + len(names))].view(torch.float32)
    main = fp32[:numel]
    states = {name: fp32[(1 + i) * numel : (2 + i) * numel] for i, name in enumerate(names)}
    gradient = fp32[(1 + len(names)) * numel : (2 + len(names)) * numel]
    end = numel * _FP32_BYTES * (1 + len(names))
    if weight_dtype == torch.float32:
        return Workspace(main, states, gradient, main, memory[numel * _FP32_BYTES : end])
    start = numel * _FP32_BYTES * (2 + len(names))
    weight = memory[start : start + numel * weight_dtype.itemsize].view(weight_dtype)
    return Workspace(main, states, gradient, weight, memory[:end])


class Lease(Protocol):
    """A chunk in working memory."""

    @property
    def workspace(self) -> Workspace: ...

    def wait(self) -> None:
        """Return when the record is there."""
        ...

    def write_back(self, others: Sequence[Handle], *, main_only: bool = False) -> None:
        """Store the record; the working memory is free again when that and ``others`` are done.

        ``main_only``: the states are blank, store the main weight alone; the next `open` gives zeros for the states.
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
        """Bring a chunk into working memory; None when there is no free page and ``is_blocking`` is False."""
        ...


@dataclass
class _UnitRecords:
    extent: Extent | None
    offsets: list[int]
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
        if main_only:
            has_main = self.workspace.weight is not self.workspace.main
            record = record[: self.workspace.main.numel() * _FP32_BYTES if has_main else 0]
        records = self._records
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

    def __init__(self, swapper: Swapper, arena: StagingArena, weight_dtype: torch.dtype) -> None:
        self.swapper = swapper
        self._arena = arena
        self._weight_dtype = weight_dtype
        self._records: dict[int, _UnitRecords] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        offsets: list[int] = []
        total = 0
        for chunk in chunks:
            offsets.append(total)
            total += record_bytes(chunk.numel, len(names), self._weight_dtype.itemsize)
        name_of = record_contents(chunks, [*offsets, total], names)
        extent = self.swapper.allocate(total, f"optimizer state of {unit.name}", name_of=name_of) if total else None
        self._records[unit.index] = _UnitRecords(extent, offsets, tuple(names), [0] * len(chunks))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index].names

    def open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> Lease | None:
        records = self._records[unit.index]
        owner = f"optimizer state of {unit.name}"
        page = self._arena.lease(owner=owner) if is_blocking else self._arena.try_lease(owner=owner)
        if page is None:
            return None
        workspace = lay_out(page.tensor, chunk.numel, records.names, self._weight_dtype)
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

    def __init__(self, device: torch.device, weight_dtype: torch.dtype) -> None:
        self._device = device
        self._weight_dtype = weight_dtype
        self._records: dict[int, tuple[torch.Tensor, list[int], tuple[str, ...]]] = {}

    def allocate(self, unit: Unit, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        offsets: list[int] = []
        total = 0
        for chunk in chunks:
            offsets.append(total)
            total += record_bytes(chunk.numel, len(names), self._weight_dtype.itemsize)
        memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
        self._records[unit.index] = (memory, offsets, tuple(names))

    def names_of(self, unit: Unit) -> Sequence[str]:
        return self._records[unit.index][2]

    def open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> Lease | None:
        memory, offsets, names = self._records[unit.index]
        numel = chunk.numel
        offset = offsets[chunk.index]
        record = memory[offset : offset + record_bytes(numel, len(names), self._weight_dtype.itemsize)]
        fp32 = record.view(torch.float32)
        gradient = torch.empty(numel, dtype=torch.float32, device=self._device)
        if self._weight_dtype == torch.float32:
            main = torch.empty(numel, dtype=torch.float32, device=self._device)
            states = {name: fp32[i * numel : (i + 1) * numel] for i, name in enumerate(names)}
            return _ResidentLease(Workspace(main, states, gradient, main, record))
        states = {name: fp32[(1 + i) * numel : (2 + i) * numel] for i, name in enumerate(names)}
        weight = torch.empty(numel, dtype=self._weight_dtype, device=self._device)
        return _ResidentLease(Workspace(fp32[:numel], states, gradient, weight, record))
