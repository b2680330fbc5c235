"""The vertical schedule's activation checkpoints: inputs of units, in RAM up to the budget and on NVMe beyond it."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from infinity.activations.spilled import ALIGNMENT, Spilled, Spilling, SpillSpace
from infinity.activations.unsupported import UnsupportedSchedule
from infinity.device.drive_tensors import is_dense
from infinity.errors import BudgetTooSmallError, StorageError
from infinity.metrics.clock import StepClock
from infinity.paging.saved_tensors import top_hooks

logger = logging.getLogger(__name__)


class ActivationCheckpoint(Spilled):
    """A tensor that is needed again in backward."""

    source: Any
    """What the coordinator's ``pack`` gave: (tensor, version), or a packed saved tensor for a view of a weight. None
    while the tensor is not in memory."""

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        super().__init__(tensor.nbytes, packed)
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.stride: tuple[int, ...] = ()
        self.version: int | None = packed[1] if isinstance(packed, tuple) else None
        # Calls of blocks that have it as an input, e.g. a mask that all blocks get. The last `release` frees it.
        self.num_users = 0

    def check_unchanged(self) -> None:
        """Raise `UnsupportedSchedule` if somebody has written to it."""
        if isinstance(self.source, tuple) and self.source[0]._version != self.source[1]:
            raise _written_to()


class ActivationCheckpoints(Spilling[ActivationCheckpoint]):
    """All activation checkpoints of one step."""

    def __init__(
        self,
        space: SpillSpace,
        clock: StepClock,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        capacity_bytes: int | None,
    ) -> None:
        """
        Args:
            space, clock, capacity_bytes: as of `Spilling`; a capacity of None: no limit, and nothing leaves memory.
            pack, unpack: the coordinator's: a view of a unit's weights is kept as a packed saved tensor.
        """
        super().__init__(space, clock, capacity_bytes or 0)
        self._is_limited = capacity_bytes is not None
        self._pack = pack
        self._unpack = unpack
        # id -> the tensor's reference, since an id is reused after the tensor's death, and its checkpoint. Until
        # backward.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], ActivationCheckpoint]] = {}
        # Checkpoints on NVMe in the order of backward, next first. The limit on memory stops `_read_ahead`.
        self._to_read: deque[ActivationCheckpoint] = deque()
        # All that count against the capacity, as an ordered set: for `close`.
        self._admitted: dict[ActivationCheckpoint, None] = {}

    # ----------------------------------------------------------------------------------------------------- forward

    def hooks_with(self, trail: object) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """The coordinator's pack and unpack; whatever is packed keeps ``trail`` alive."""
        unpack = self._unpack

        def unpack_with(saved: Any, trail: object = trail) -> torch.Tensor:
            return unpack(saved)

        return self._pack, unpack_with

    def hooks_are_innermost(self) -> bool:
        """Whether no hooks for saved tensors are active but the coordinator's: activation checkpointing has its own."""
        top = top_hooks()
        return top is None or bool(top[0] == self._pack)

    def without_weights(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy of it if it is a view of a unit's weights, which move."""
        return tensor if isinstance(self._pack(tensor), tuple) else tensor.clone()

    def keep(self, tensor: torch.Tensor) -> ActivationCheckpoint:
        """Keep ``tensor``, which nobody may write to until it is released."""
        known = self._known.get(id(tensor))
        # The same tensor for another block. One with no user left was released, and is kept anew.
        if known is not None and known[0]() is tensor and known[1].num_users:
            kept = known[1]
            kept.check_unchanged()
            if kept.version is not None and kept.version != tensor._version:  # it may have left memory since
                raise _written_to()
        else:
            # Detached: the graph of the caller must not live as long as the checkpoint.
            kept = ActivationCheckpoint(tensor, self._pack(tensor.detach()))
            self._known[id(tensor)] = weakref.ref(tensor), kept
            if self._is_limited and isinstance(kept.source, tuple) and _can_leave(tensor):
                kept.stride = tensor.stride()
                self._admitted[kept] = None
                self._admit(kept)
                self._make_room()
        kept.num_users += 1
        return kept

    def _source_of(self, item: ActivationCheckpoint) -> torch.Tensor | None:
        if item.source is None or item.num_users > 1:
            # Released already, or needed by several blocks: that would be read again for each of them.
            return None
        item.check_unchanged()
        tensor = self._unpack(item.source)
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def _start_write(self, item: ActivationCheckpoint, source: torch.Tensor) -> None:
        try:
            super()._start_write(item, source)
        except BudgetTooSmallError as error:
            raise UnsupportedSchedule(
                "the inputs of units need more memory than infinity.host_memory_budget leaves, and the config names "
                "no drive for them"
            ) from error
        except StorageError as error:
            logger.warning("no room for the inputs of units: %s", error)
            raise UnsupportedSchedule(
                f"the inputs of units need more memory than the budget leaves, and {error}"
            ) from error

    def check_unchanged(self) -> None:
        """Raise `UnsupportedSchedule` if something that is in memory was written to."""
        for _, kept in self._known.values():
            kept.check_unchanged()

    # ---------------------------------------------------------------------------------------------------- backward

    def begin_backward(self, order: Iterable[ActivationCheckpoint]) -> None:
        """Forward is over. Backward will `load` in ``order``, so reads begin in this order."""
        self._known.clear()
        # From here on nothing new is written: what is in memory is needed soon.
        self._oldest_first.clear()
        # Memory of finished writes is free now. What a write is still using serves backward instead, without a read.
        self._end_writes()
        self._to_read = deque(kept for kept in dict.fromkeys(order) if kept.source is None)
        self._read_ahead()

    def load(self, kept: ActivationCheckpoint) -> torch.Tensor:
        """The tensor, read from NVMe if it is not in memory."""
        if kept.source is None:  # it was spilled: its bytes are on NVMe, or in memory on their way out or in
            self._await_memory(kept)
            # Packed with the version of now, so that a write between here and its use is noticed.
            kept.source = self._pack(_view(kept))
        self._read_ahead()
        return self._unpack(kept.source)

    def _read_ahead(self) -> None:
        while self._to_read:
            kept = self._to_read[0]
            if kept.num_users and kept.source is None and kept.memory is None:
                # Full: the next `load` comes here again, after a `release`.
                if self._held_bytes + kept.moved_bytes > self._limit_bytes:
                    return
                self._start_read(kept)
            self._to_read.popleft()

    def release(self, kept: ActivationCheckpoint) -> None:
        """One call of a block is done with it."""
        kept.num_users -= 1
        if kept.num_users:
            return
        if kept in self._writing:
            self._writing.remove(kept)
        self._admitted.pop(kept, None)
        self._release(kept)

    def close(self) -> None:
        """Release everything. Also after an error."""
        for kept in self._admitted:
            self._release(kept)
        self._admitted.clear()
        self._writing.clear()
        self._known.clear()


def _written_to() -> UnsupportedSchedule:
    return UnsupportedSchedule("the input of a block is written to after the block has used it")


def _can_leave(tensor: torch.Tensor) -> bool:
    return (
        # Conjugate and negative bits, and gaps, would be lost in a copy of bytes. ALIGNMENT: see spilled.py.
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
        and is_dense(tensor)
        and tensor.data_ptr() % ALIGNMENT == 0
    )


def _view(kept: ActivationCheckpoint) -> torch.Tensor:
    if kept.memory is None:
        raise RuntimeError("a tensor that was kept is gone")
    return kept.memory[: kept.num_bytes].view(kept.dtype).as_strided(kept.shape, kept.stride)
