"""Main gradients: what autograd delivers, kept until the update.

Knows units and gradients; must not know when a unit is complete (`infinity.collector`) or how it is updated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from infinity.device import ComputeDevice, Fence, FlatBuffer, gradient_norm
from infinity.flat_pool import FlatPool
from infinity.layout import Chunk, Piece, Slot
from infinity.telemetry.clock import StepClock
from infinity.unit import Unit
from infinity.update import GradientSource
from swapper import Extent, Handle, Priority, Swapper

_FP32_BYTES = 4
_BLOCK_NUMEL = 1 << 20
_POLL_SECONDS = 1.0
_MOST_UNITS_ON_DEVICE = 2
"""Units whose gradients may wait in a GPU's memory for their update."""


def in_slot_order(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The gradient with the strides of its parameter, so that both have one order in memory."""
    if tuple(gradient.stride()) == slot.spec.stride and not gradient.is_sparse:
        return gradient
    ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=gradient.dtype, device=gradient.device)
    return ordered.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


class _Source:
    """Common to all sources: which parameters have a gradient, and whether the update has used them up."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        self._used_up = threading.Event()

    def slots(self) -> Sequence[Slot]:
        """The parameters that have a gradient."""
        return self._slots

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        """See `GradientSource.prepare`."""
        return None

    def release(self) -> None:
        """The update has used them up, or failed."""
        self._used_up.set()

    def is_released(self) -> bool:
        """Whether the memory is free."""
        return self._used_up.is_set()

    def wait(self) -> None:
        """Return when the memory is free."""
        while not self._used_up.wait(_POLL_SECONDS):  # so that a KeyboardInterrupt gets through
            pass


class DeviceGradients(_Source):
    """Gradients as autograd delivered them, in the memory of a GPU; the update fetches them piece by piece."""

    def __init__(self, gradients: Mapping[Slot, torch.Tensor], device: ComputeDevice, after: Fence) -> None:
        """``gradients`` have the strides of their parameters (see `in_slot_order`)."""
        super().__init__(list(gradients))
        self._gradients = {slot.index: _flat(gradient) for slot, gradient in gradients.items()}
        self._device = device
        self._after = after

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        source = self._gradients[piece.slot.index][piece.start : piece.stop]
        if source.device == scratch.device:
            return scratch.copy_(source)
        landing = torch.empty(source.shape, dtype=source.dtype)
        self._device.download(landing, source, self._after)
        return scratch.copy_(landing)

    def release(self) -> None:
        self._gradients.clear()
        super().release()


class _Buffer:
    """The main gradients of one unit in host memory: fp32, element for element like the trainable segment."""

    def __init__(self, unit: Unit, flat: FlatBuffer) -> None:
        self.flat = flat
        self.values = flat.tensor()[: unit.layout.trainable_numel * _FP32_BYTES].view(torch.float32)

    def view(self, slot: Slot) -> torch.Tensor:
        """The main gradient of one parameter, with its shape and strides."""
        return self.values.as_strided(slot.spec.shape, slot.spec.stride, slot.start)

    def add(self, gradients: Mapping[Slot, torch.Tensor], present: Iterable[int], device: ComputeDevice) -> None:
        """Add in fp32; parameters not in ``present`` have no gradient yet."""
        known = set(present)
        for slot, gradient in gradients.items():
            source = _flat(in_slot_order(gradient.detach(), slot))
            if source.device.type != "cpu":
                landing = torch.empty(source.shape, dtype=source.dtype)
                device.download(landing, source, device.mark())
                source = landing
            target = self.values[slot.start : slot.stop]
            if slot.index not in known:
                target.copy_(source)
                continue
            for start in range(0, source.numel(), _BLOCK_NUMEL):
                # torch converts a bf16 operand to fp32 as a whole: block by block that is bounded.
                target[start : start + _BLOCK_NUMEL].add_(source[start : start + _BLOCK_NUMEL])


class _MemorySource(_Source):
    """Main gradients in RAM, for an update."""

    def __init__(self, buffer: _Buffer, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self._values: torch.Tensor | None = buffer.values

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        if self._values is None:
            raise RuntimeError("the gradients have been released")
        start = piece.slot.start + piece.start
        values = self._values[start : start + piece.numel]
        return values if values.device == scratch.device else scratch.copy_(values)

    def release(self) -> None:
        self._values = None  # a view would keep the memory from being unmapped
        super().release()


class _SpilledSource(_Source):
    """Main gradients on NVMe, for an update."""

    def __init__(self, swapper: Swapper, extent: Extent, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self._swapper = swapper
        self._extent = extent

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        offset = chunk.start * _FP32_BYTES
        if scratch.device.type == "cpu":
            return self._swapper.read(self._extent, scratch, offset=offset, priority=Priority.PREFETCH)
        landing = torch.empty(scratch.shape, dtype=scratch.dtype)
        self._swapper.read(self._extent, landing, offset=offset).wait()
        scratch.copy_(landing)
        return None

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        return scratch


class _Loan(Protocol):
    """Memory in use by something that ends by itself."""

    def is_released(self) -> bool: ...

    def wait(self) -> None: ...


class _Write:
    """Gradients on their way to NVMe."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def is_released(self) -> bool:
        return self._handle.done()

    def wait(self) -> None:
        self._handle.wait()


class GradientStore:
    """The main gradients of all units, in one pool of host memory.

    Kept until the step (`add`): in RAM for the units that the plan names, spilled to NVMe as fp32 for the others.
    On their way into an update in backward (`hand_over`): in RAM until the update has used them up.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: ComputeDevice,
        clock: StepClock,
        *,
        in_memory: Iterable[int],
        open_swapper: Callable[[], Swapper],
        pool: FlatPool,
    ) -> None:
        """
        Args:
            units: all units, by index.
            device: the compute device.
            clock: counts the waiting.
            in_memory: indices of the units whose gradients stay in RAM.
            open_swapper: gives the swapper to which the others are spilled, at their first use.
            pool: host memory for all of it.
        """
        self._units = list(units)
        self._device = device
        self._clock = clock
        self._in_memory = frozenset(in_memory)
        self._open_swapper = open_swapper
        self._swapper: Swapper | None = None
        self._pool = pool
        self._buffers: dict[int, _Buffer] = {}
        self._extents: dict[int, Extent] = {}
        self._present: dict[int, set[int]] = {}
        self._spilled_norms: dict[tuple[int, int], torch.Tensor] = {}
        self._loans: deque[tuple[_Loan, FlatBuffer | None]] = deque()

    def reserve(self) -> Swapper:
        """Allocate the extents for spilled gradients, if that has not happened yet."""
        if self._swapper is None:
            self._swapper = self._open_swapper()
            for unit in self._units:
                if unit.layout.trainable_numel and unit.index not in self._in_memory:
                    num_bytes = unit.layout.trainable_numel * _FP32_BYTES
                    self._extents[unit.index] = self._swapper.allocate(num_bytes, f"gradients of {unit.name}")
        return self._swapper

    @property
    def has_any(self) -> bool:
        """Whether any main gradient is kept."""
        return any(self._present.values())

    def slots_with_gradient(self, unit: Unit) -> list[Slot]:
        """The parameters of the unit that have a main gradient."""
        present = self._present.get(unit.index, set())
        return [slot for slot in unit.layout.slots if slot.index in present]

    def is_spilled(self, unit: Unit) -> bool:
        """Whether the unit's main gradients go to NVMe."""
        return unit.index not in self._in_memory

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Main gradients += ``gradients`` (any floating dtype), in fp32."""
        present = self._present.setdefault(unit.index, set())
        if unit.index in self._in_memory:
            self._memory_of(unit).add(gradients, present, self._device)
        else:
            self._add_spilled(unit, gradients, present)
        present.update(slot.index for slot in gradients)

    def hand_over(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        """Main gradients += ``gradients``, and all of the unit's go to an update that runs next.

        The 2-norm of each parameter's gradient is put into ``norms``, by (unit index, slot index).
        """
        present = self._present.get(unit.index)
        if unit.index in self._in_memory and (present or unit.index in self._buffers):
            self.add(unit, gradients)
            for slot in self.slots_with_gradient(unit):
                norms[unit.index, slot.index] = self.norm_of(unit, slot)
            return self.source(unit)
        if not present and not self._device.shares_host_memory:
            return self._leave_on_device(unit, gradients, norms)
        buffer = self._sum(unit, gradients, present or set())
        slots = [slot for slot in unit.layout.slots if slot in gradients or slot.index in (present or ())]
        self._present.pop(unit.index, None)
        for slot in slots:
            norms[unit.index, slot.index] = gradient_norm(buffer.view(slot))
        source = _MemorySource(buffer, slots)
        self._loans.append((source, buffer.flat))
        return source

    def _leave_on_device(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        ordered = {slot: in_slot_order(gradient, slot) for slot, gradient in gradients.items()}
        for slot, gradient in ordered.items():
            norms[unit.index, slot.index] = gradient_norm(gradient)
        while sum(flat is None for _, flat in self._loans) >= _MOST_UNITS_ON_DEVICE:
            self._retire_oldest()
        source = DeviceGradients(ordered, self._device, self._device.mark())
        self._loans.append((source, None))
        return source

    def _sum(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], present: set[int]) -> _Buffer:
        """What is spilled of the unit plus ``gradients``, in fresh memory."""
        buffer = _Buffer(unit, self._take(unit.layout.trainable_numel * _FP32_BYTES))
        try:
            if present:
                swapper, extent = self._spill(unit)
                with self._clock.waiting("read"):
                    swapper.read(extent, buffer.values).wait()
            buffer.add(gradients, present, self._device)
        except BaseException:
            self._pool.give_back(buffer.flat)
            raise
        return buffer

    def _memory_of(self, unit: Unit) -> _Buffer:
        if unit.index not in self._buffers:
            self._buffers[unit.index] = _Buffer(unit, self._take(unit.layout.trainable_numel * _FP32_BYTES))
        return self._buffers[unit.index]

    def _add_spilled(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], present: set[int]) -> None:
        swapper, extent = self._spill(unit)
        buffer = self._sum(unit, gradients, present)
        for slot in gradients:
            self._spilled_norms[unit.index, slot.index] = gradient_norm(buffer.view(slot))
        self._loans.append((_Write(swapper.write(extent, buffer.values)), buffer.flat))

    def _spill(self, unit: Unit) -> tuple[Swapper, Extent]:
        return self.reserve(), self._extents[unit.index]

    def _take(self, num_bytes: int) -> FlatBuffer:
        self._retire()
        while True:
            flat = self._pool.allocate(num_bytes)
            if flat is not None:
                return flat
            if not self._loans:
                raise RuntimeError(f"the plan's memory for gradients has no room for {num_bytes} bytes")
            self._retire_oldest()

    def _retire(self) -> None:
        """Take back what is free again."""
        for _ in range(len(self._loans)):
            loan, flat = self._loans.popleft()
            if not self._take_back(loan, flat):
                self._loans.append((loan, flat))

    def _take_back(self, loan: _Loan, flat: FlatBuffer | None) -> bool:
        if not loan.is_released():
            return False
        if flat is not None:
            self._pool.give_back(flat)
        return True

    def _retire_oldest(self) -> None:
        with self._clock.waiting("gradients"):
            self._loans[0][0].wait()
        loan, flat = self._loans.popleft()
        self._take_back(loan, flat)

    def gradient_of(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        """The live main gradient in RAM (fp32, the parameter's shape), None without one. Not for spilled units."""
        if slot.index not in self._present.get(unit.index, ()):
            return None
        return self._memory_of(unit).view(slot)

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Replace one parameter's main gradient (in RAM), or drop it."""
        present = self._present.setdefault(unit.index, set())
        present.discard(slot.index)
        if gradient is not None:
            self.add(unit, {slot: gradient})

    def norm_of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """2-norm of one parameter's whole main gradient: 0-dim fp32."""
        if unit.index in self._in_memory:
            return gradient_norm(self._memory_of(unit).view(slot))
        return self._spilled_norms[unit.index, slot.index]

    def source(self, unit: Unit) -> GradientSource:
        """The unit's main gradients for an update. They count as gone from now on; the update must be the next to use them."""
        slots = self.slots_with_gradient(unit)
        self._present.pop(unit.index, None)
        if unit.index in self._in_memory:
            return _MemorySource(self._memory_of(unit), slots)
        swapper, extent = self._spill(unit)
        return _SpilledSource(swapper, extent, slots)

    def clear(self) -> None:
        """Forget all main gradients; the memory stays reserved."""
        self._present.clear()
        self._spilled_norms.clear()

    def close(self) -> None:
        """Give the memory back."""
        for _, flat in self._loans:
            if flat is not None:
                self._pool.give_back(flat)
        for buffer in self._buffers.values():
            self._pool.give_back(buffer.flat)
        self._loans.clear()
        self._buffers.clear()


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global 2-norm from the norms per parameter, in the order of the parameter groups. 0-dim fp32 tensor."""
    if not norms:
        return torch.tensor(0.0)
    first = norms[0].device
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)
    return norm


def clip_coefficient(norm: torch.Tensor, maximum: float) -> torch.Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies with. 0-dim fp32 tensor."""
    return torch.clamp(maximum / (norm + 1e-6), max=1.0)
