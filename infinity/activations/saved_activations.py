"""What autograd saves in the model's forward: kept in RAM up to the budget, on NVMe beyond it (`infinity.activations`).

[Note: away] Memory is kept, written and read by storage, so that tensors that share memory (views, what several
operations save) share it afterwards, too. Two tensors are the same bytes if they have the same storage (held weakly, so
that its address is not reused), the same version counter, and, once the bytes have left, the same base: `tensor.data`
shares the storage, but has a version counter of its own. If the script writes to a saved tensor before backward, torch
raises. So a packed tensor keeps an alias without memory, which has the tensor's version counter, and `load` compares. A
storage that was changed before it is written out stays in memory. The graph owns packed tensors, and these own a claim
on their storage. When the last claim dies, memory is released at once. The space on the drive is freed at the next call
here, because a finalizer may not take the lock.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.activations.spilled import ALIGNMENT, Spilled, Spilling, SpillSpace
from infinity.errors import BudgetTooSmallError, EngineClosedError, format_bytes
from infinity.metrics.clock import StepClock
from infinity.paging.saved_tensors import modified
from infinity.torch_internals.names import in_backward

# Three choices that were not measured.
_LEAST_BYTES = 64 << 10
"""Smaller storages stay in memory: each one moved costs a request, and their sum is small."""
_LARGEST_SHARE = 8
"""A storage of more than 8 times the saved tensor's bytes stays: it belongs to something larger, a data set or a
cache."""
_LOOK_BACK = 64
"""Storages before the needed one that are candidates for reading ahead: it bounds the search at each `load`."""


class _Stored(Spilled):
    """The bytes of one storage."""

    source: torch.Tensor | None

    def __init__(self, number: int, tensor: torch.Tensor, root: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        super().__init__(storage.nbytes(), _bytes_of(tensor))
        # Counted in the order of saving, which backward needs in reverse.
        self.number = number
        self.device = tensor.device
        self.key = StorageWeakRef(storage)
        self.root = weakref.ref(root)
        self.count = _count_of(tensor)
        self.version = tensor._version
        self.claim: weakref.ref[_Claim] | None = None

    def bring_to_host(self) -> None:
        """From a GPU to pinned memory."""
        if self.source is not None:
            self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.memory.copy_(self.source)
            self.source = None


class _Claim:
    """Owned by packed tensors of one storage: when it dies, no graph needs the bytes."""

    def __init__(self, stored: _Stored, dead: deque[_Stored]) -> None:
        self.stored = stored
        self._dead = dead
        stored.claim = weakref.ref(self)

    def __del__(self) -> None:
        # A finalizer: it may run on any thread, in the midst of `pack` or `load`, so it takes no lock and only appends.
        self.stored.source = None
        # Else a drive still reads from or writes to this memory, and `_sweep` releases it.
        if self.stored.under_way is None:
            self.stored.memory = None
        self._dead.append(self.stored)


class _PackedActivation:
    """Stands for a tensor in autograd's graph."""

    __slots__ = ("__weakref__", "_claim", "_count", "_owner", "_version", "dtype", "offset", "shape", "stride")

    def __init__(self, owner: SavedActivations, claim: _Claim, tensor: torch.Tensor) -> None:
        self._owner = owner
        self._claim = claim
        self._count = _count_of(tensor)
        self._version = tensor._version
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def load(self) -> torch.Tensor:
        """The tensor again.

        Raises:
            RuntimeError: it was written to after it had been saved.
            EngineClosedError: it went with the engine.
            SwapperError: reading it failed.
        """
        # The check that autograd makes for what it saves without hooks.
        if self._count._version != self._version:
            raise modified(self._count, self._version, self.shape)
        memory = self._owner.load(self._claim.stored)
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class SavedActivations(Spilling[_Stored]):
    """Keeps what autograd saves, in RAM or on NVMe, until backward. Thread safe."""

    def __init__(self, space: SpillSpace, clock: StepClock, capacity_bytes: int) -> None:
        super().__init__(space, clock, capacity_bytes)
        self._lock = threading.RLock()
        self._dead: deque[_Stored] = deque()
        self._known: dict[StorageWeakRef, _Stored] = {}
        self._all: dict[int, _Stored] = {}
        self._read: deque[_Stored] = deque()
        """In memory and on the drive, in the order in which they were read."""
        self._leaving: list[_Stored] = []
        """Needed by no graph, but a read or write still uses their memory."""
        self._num_stored = 0
        self._is_closed = False
        self.kept_bytes = 0
        """Bytes taken so far."""

    # ----------------------------------------------------------------------------------------------------- forward

    def pack(self, tensor: torch.Tensor) -> _PackedActivation | None:
        """What autograd keeps in place of ``tensor``, see [Note: away]; None: autograd keeps the tensor itself.

        Raises:
            StorageError: there is no room on the drives.
            SwapperError: a write failed.
        """
        if self._is_closed or in_backward() or not _can_leave(tensor):
            return None
        # `_base` is the tensor that all views of one storage were made from; they share its version counter.
        root = tensor if tensor._base is None else tensor._base
        with self._lock:
            self._sweep()
            claim = self._find(tensor, root) or self._add_storage(tensor, root)
            packed = _PackedActivation(self, claim, tensor)
            self._make_room()
        return packed

    def _find(self, tensor: torch.Tensor, root: torch.Tensor) -> _Claim | None:
        stored = self._known.get(StorageWeakRef(tensor.untyped_storage()))
        if stored is None or stored.claim is None or stored.version != tensor._version:
            return None
        # While the bytes are here, the storage cannot be another one. Afterwards only the same root proves it.
        is_same = stored.source is not None or stored.root() is root
        return stored.claim() if is_same and stored.count._version == stored.version else None

    def _add_storage(self, tensor: torch.Tensor, root: torch.Tensor) -> _Claim:
        stored = _Stored(self._num_stored, tensor, root)
        claim = _Claim(stored, self._dead)
        self._num_stored += 1
        self._known[stored.key] = self._all[stored.number] = stored
        self._admit(stored)
        self.kept_bytes += stored.num_bytes
        return claim

    def _source_of(self, item: _Stored) -> torch.Tensor | None:
        return item.source if item.count._version == item.version else None

    # ---------------------------------------------------------------------------------------------------- backward

    def load(self, stored: _Stored) -> torch.Tensor:
        """All bytes of a storage, on its device. Storages saved before it are read ahead."""
        with self._lock:
            self._sweep()
            if self._is_closed:
                raise EngineClosedError.after_close("backward")
            source = stored.source
            if source is None:
                self._await_memory(stored)
                if stored.memory is None:
                    raise RuntimeError("a tensor that was saved for backward is gone")
                source = stored.memory.to(stored.device)
            self._read_ahead(stored)
            return source

    def _start_read(self, item: _Stored) -> None:
        # The oldest reads make room. They are on the drive, so nothing is lost.
        while self._read and self._held_bytes + item.moved_bytes > self._limit_bytes:
            oldest = self._read.popleft()  # another backward may need it again, and reads it again
            if oldest.memory is not None and oldest.under_way is None:
                self._drop_memory(oldest)
        super()._start_read(item)
        self._read.append(item)

    def _read_ahead(self, stored: _Stored) -> None:
        # Backward needs storage 100: look at 99, 98, ... 36, and read what is on the drive until the limit is
        # reached.
        for number in range(stored.number - 1, max(stored.number - _LOOK_BACK, 0) - 1, -1):
            earlier = self._all.get(number)
            if earlier is None or earlier.memory is not None or not earlier.is_written:
                continue
            if self._held_bytes + earlier.moved_bytes > self._limit_bytes:
                return
            self._start_read(earlier)

    # ------------------------------------------------------------------------------------------------------- the end

    def _sweep(self) -> None:
        """Free the extents of storages that no graph needs, as soon as no request uses them."""
        while self._dead:
            stored = self._dead.popleft()
            self._all.pop(stored.number, None)
            if self._known.get(stored.key) is stored:
                del self._known[stored.key]
            if stored in self._writing:
                self._writing.remove(stored)
            if stored in self._read:
                self._read.remove(stored)
            self._leaving.append(stored)
        still = []
        for stored in self._leaving:
            if stored.under_way is not None and not stored.under_way.done():
                still.append(stored)
            else:
                self._release(stored)
        has_left = len(still) < len(self._leaving)
        self._leaving = still
        # All graphs are gone: the next step starts with sizes of its own.
        if has_left and not self._all and not still:
            self._oldest_first.clear()
            self._slack_bytes = 0

    def close(self) -> None:
        """Release everything. Also after an error. A later backward raises EngineClosedError."""
        with self._lock:
            self._is_closed = True
            for stored in [*self._all.values(), *self._leaving]:
                self._release(stored)
            groups = self._all, self._known, self._oldest_first, self._writing, self._read, self._leaving, self._dead
            for group in groups:
                group.clear()


class HostActivations(SavedActivations):
    """`infinity.activations` "cpu": all stays in host memory. Tensors of a GPU are copied there when they are saved."""

    def __init__(self, clock: StepClock, capacity_bytes: int, budget_bytes: int) -> None:
        """
        Args:
            clock: counts the waiting.
            capacity_bytes: host memory for it, a part of the budget.
            budget_bytes: the budget, for messages.
        """
        super().__init__(SpillSpace(_refuse_drive_space), clock, capacity_bytes)
        self._budget_bytes = budget_bytes

    def _make_room(self) -> None:
        held, capacity = self._held_bytes, self._capacity_bytes
        if held > capacity:
            raise BudgetTooSmallError(
                "infinity.host_memory_budget",
                budget_bytes=self._budget_bytes,
                minimum_bytes=self._budget_bytes + 2 * (held - capacity),
                reason=f'infinity.activations is "cpu": the tensors that autograd saves take {format_bytes(held)} so '
                f"far, and {format_bytes(capacity)} of the budget are reserved for them. Set "
                'infinity.activations to "nvme" to write the rest to the drives, or set '
                "infinity.activation_checkpointing to true to save fewer tensors",
            )
        # From the right: the storage that `pack` has just admitted. Older ones were brought to the host before.
        stored = self._oldest_first.pop() if self._oldest_first else None
        if stored is not None and stored.source is not None and stored.device.type != "cpu":
            stored.bring_to_host()


def _refuse_drive_space(num_bytes: int) -> NoReturn:
    raise RuntimeError("activations in host memory are not written")


def _count_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that counts the writes to ``tensor``."""
    count = tensor.detach()
    # Assigning `.data` exchanges the memory and keeps the version counter, which detach() shares with the tensor.
    count.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return count


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _can_leave(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Buffer:
        return False  # parameters, and classes with memory of their own
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_inference():
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return (
        num_bytes >= _LEAST_BYTES
        and num_bytes <= _LARGEST_SHARE * tensor.nbytes
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().data_ptr() % ALIGNMENT == 0
    )
