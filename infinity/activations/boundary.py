"""Inputs of units between their forward and their backward: in RAM as far as the budget goes, on NVMe beyond it.

Knows tensors, bytes and extents; must not know what computes with them.

[Note: memory on the way] What is written leaves from a copy that drives take as it is, and what is read arrives in such
memory: torch's own begins anywhere, and would go through other memory on its way, of which every thread of a backend keeps
as much as its largest transfer. Such memory is used once. It goes back to the system when nobody refers to it any more:
neither the model's graph nor the request.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.activations.refusal import Refusal
from infinity.activations.spill_space import BLOCK_BYTES, SpillSpace
from infinity.device.drive_tensors import is_dense
from infinity.metrics.clock import StepClock
from infinity.paging.saved_tensors import top_hooks
from swapper import AlignedRegion, Extent, Handle, Priority, Swapper, SwapperError

ALIGNMENT = 64
"""Where torch's own memory begins. A tensor that begins elsewhere would be computed with differently after a detour."""


class Kept:
    """A tensor that is needed again in backward."""

    def __init__(self, tensor: torch.Tensor, token: Any) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.stride: tuple[int, ...] = ()
        self.num_bytes = tensor.nbytes
        """Of its contents."""
        self.moved_bytes = -(-tensor.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        """Of the memory that it takes on its way, and of what is read and written."""
        self.can_leave = False
        self.token = token
        """What the pager's ``pack`` gave; None while the tensor is not in memory."""
        self.version: int | None = token[1] if isinstance(token, tuple) else None
        self.num_users = 0
        self.place: tuple[Swapper, Extent] | None = None
        self.writing: tuple[Handle, torch.Tensor] | None = None
        self.reading: tuple[Handle, torch.Tensor] | None = None

    def check_unchanged(self) -> None:
        """Raise `Refusal` if somebody has written to it."""
        if isinstance(self.token, tuple) and self.token[0]._version != self.token[1]:
            raise _written_to()


@dataclass(eq=False)
class Boundary:
    """All that is kept of one step."""

    _space: SpillSpace
    """Where to put what exceeds the capacity."""
    _clock: StepClock
    """Counts the waiting."""
    _pack: Callable[[torch.Tensor], Any]
    """Of the pager, so that a view of a unit's weights is kept as a note of where it lies."""
    _unpack: Callable[[Any], torch.Tensor]
    """Of the pager, so that a view of a unit's weights is kept as a note of where it lies."""
    _capacity_bytes: int | None
    """Host memory to use, that of what is on its way included; None: no limit, and nothing leaves memory. At least two tensors
    are in memory, whatever it says."""
    _known: dict[int, tuple[weakref.ref[torch.Tensor], Kept]] = field(default_factory=dict)
    _oldest_first: deque[Kept] = field(default_factory=deque)
    _writing: deque[Kept] = field(default_factory=deque)
    _to_read: deque[Kept] = field(default_factory=deque)
    _away: dict[Kept, None] = field(default_factory=dict)
    _held_bytes = 0
    _slack_bytes = 0
    spilled_bytes = 0
    """Bytes that went to NVMe so far."""

    # ----------------------------------------------------------------------------------------------------- forward

    def hooks_with(self, trail: object) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """The pager's pack and unpack; whatever is packed keeps ``trail`` alive."""
        unpack = self._unpack

        def unpack_with(saved: Any, trail: object = trail) -> torch.Tensor:
            return unpack(saved)

        return self._pack, unpack_with

    def hooks_are_innermost(self) -> bool:
        """Whether no hooks for saved tensors are active but the pager's: activation checkpointing has its own."""
        top = top_hooks()
        return top is None or bool(top[0] == self._pack)

    def without_weights(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy of it if it is a view of a unit's weights, which move."""
        return tensor if isinstance(self._pack(tensor), tuple) else tensor.clone()

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep ``tensor``, which nobody may write to until it is released."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1].num_users:
            kept = known[1]
            kept.check_unchanged()
            if kept.version is not None and kept.version != tensor._version:  # it may have left memory since
                raise _written_to()
        else:
            kept = Kept(tensor, self._pack(tensor.detach()))
            self._known[id(tensor)] = weakref.ref(tensor), kept
            if isinstance(kept.token, tuple):
                self._admit(kept, tensor)
        kept.num_users += 1
        return kept

    def _admit(self, kept: Kept, tensor: torch.Tensor) -> None:
        if self._capacity_bytes is None or not _can_leave(tensor):
            return
        kept.can_leave = True
        kept.stride = tensor.stride()
        self._slack_bytes = max(self._slack_bytes, 2 * kept.moved_bytes)
        self._held_bytes += kept.moved_bytes
        self._oldest_first.append(kept)
        self._make_room(self._capacity_bytes)

    def _make_room(self, capacity_bytes: int) -> None:
        """Write the oldest out until the rest fits. Only when too much is on its way, wait for the drive."""
        while self._writing and self._is_written(self._writing[0]):
            self._end_write(self._writing.popleft())
        staying = self._held_bytes - sum(kept.moved_bytes for kept in self._writing)
        while staying > capacity_bytes - self._slack_bytes and self._oldest_first:
            kept = self._oldest_first.popleft()
            if kept.token is None or kept.num_users > 1:
                continue  # not needed any more; or by several units: that stays
            self._start_write(kept)
            staying -= kept.moved_bytes
        while self._writing and self._held_bytes > max(capacity_bytes, self._slack_bytes):
            self._end_write(self._writing.popleft())

    def _is_written(self, kept: Kept) -> bool:
        return kept.writing is not None and kept.writing[0].done()

    def _start_write(self, kept: Kept) -> None:
        kept.check_unchanged()
        kept.place = swapper, extent = self._space.take(kept.num_bytes)
        self._away[kept] = None
        memory = drive_memory(kept.moved_bytes)
        _view(memory, kept).copy_(self._unpack(kept.token))
        kept.token = None
        kept.writing = swapper.write(extent, memory), memory
        self.spilled_bytes += kept.moved_bytes
        self._writing.append(kept)

    def _end_write(self, kept: Kept) -> None:
        handle, _ = kept.writing or (None, None)
        self._wait(handle, "write")
        kept.writing = None
        self._held_bytes -= kept.moved_bytes

    def _wait(self, handle: Handle | None, cause: str) -> None:
        if handle is not None:
            self._clock.wait_for(handle, cause)

    def check_unchanged(self) -> None:
        """Raise `Refusal` if something that is in memory was written to."""
        for _, kept in self._known.values():
            kept.check_unchanged()

    # ---------------------------------------------------------------------------------------------------- backward

    def begin_backward(self, order: Iterable[Kept]) -> None:
        """Forward is over; what was kept will be loaded in ``order``."""
        self._known.clear()
        self._oldest_first.clear()
        for kept in self._writing:
            if self._is_written(kept):
                self._end_write(kept)
            elif kept.writing is not None:
                kept.token = self._pack(_view(kept.writing[1], kept))  # what is still in memory stays there
        self._writing.clear()
        self._to_read = deque(kept for kept in dict.fromkeys(order) if kept.token is None)
        self._read_ahead()

    def load(self, kept: Kept) -> torch.Tensor:
        """The tensor again."""
        if kept.token is None:
            if kept.reading is None:
                self._start_read(kept)
            handle, tensor = kept.reading or (None, torch.empty(0, dtype=torch.float32, device="cpu"))
            self._wait(handle, "read")
            kept.reading = None
            kept.token = self._pack(tensor)
        self._read_ahead()
        return self._unpack(kept.token)

    def _start_read(self, kept: Kept) -> None:
        if kept.place is None:
            raise RuntimeError("a tensor that was kept is gone")
        swapper, extent = kept.place
        memory = drive_memory(kept.moved_bytes)
        kept.reading = swapper.read(extent, memory, priority=Priority.PREFETCH), _view(memory, kept)
        self._held_bytes += kept.moved_bytes

    def _read_ahead(self) -> None:
        limit = max(self._capacity_bytes or 0, self._slack_bytes)
        while self._to_read:
            kept = self._to_read[0]
            if kept.num_users and kept.token is None and kept.reading is None:
                if self._held_bytes + kept.moved_bytes > limit:
                    return
                self._start_read(kept)
            self._to_read.popleft()

    def release(self, kept: Kept) -> None:
        """One user needs it no more."""
        kept.num_users -= 1
        if kept.num_users:
            return
        if kept.can_leave and (kept.token is not None or kept.reading is not None or kept in self._writing):
            self._held_bytes -= kept.moved_bytes
        if kept in self._writing:
            self._writing.remove(kept)
        self._let_go(kept)

    def _let_go(self, kept: Kept) -> None:
        for under_way, cause in ((kept.reading, "read"), (kept.writing, "write")):
            if under_way is not None:
                self._wait(under_way[0], cause)
        kept.token = kept.reading = kept.writing = None
        if kept.place is not None:
            self._space.give_back(kept.num_bytes, kept.place)
            self._away.pop(kept, None)
            kept.place = None

    def close(self) -> None:
        """Let go of everything, after whatever went wrong."""
        for kept in list(self._away):
            try:
                self._let_go(kept)
            except SwapperError:
                place, kept.place = kept.place, None
                if place is not None:
                    self._space.discard(place)
        self._away.clear()
        self._known.clear()


def _written_to() -> Refusal:
    return Refusal("the input of a block is written to after the block has used it")


def _can_leave(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
        and is_dense(tensor)
        and tensor.data_ptr() % ALIGNMENT == 0
    )


def drive_memory(num_bytes: int) -> torch.Tensor:
    """See [Note: memory on the way]: uint8; ``num_bytes`` are whole blocks."""
    return torch.from_numpy(AlignedRegion(num_bytes).array())


def _view(memory: torch.Tensor, kept: Kept) -> torch.Tensor:
    return memory[: kept.num_bytes].view(kept.dtype).as_strided(kept.shape, kept.stride)
