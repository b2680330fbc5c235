"""Main gradients: what autograd delivers, kept until the update.

Knows units and gradients; must not know when a unit is complete (`infinity.collector`) or how it is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from infinity.device import ComputeDevice, Fence, gradient_norm
from infinity.flat_pool import FlatPool
from infinity.layout import Chunk, Piece, Slot
from infinity.telemetry.clock import StepClock
from infinity.unit import Unit
from swapper import AlignedRegion, Extent, Handle, Priority, Swapper

_FP32_BYTES = 4


def in_slot_order(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The gradient with the strides of its parameter, so that both have one order in memory."""
    if tuple(gradient.stride()) == slot.spec.stride and not gradient.is_sparse:
        return gradient
    ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=gradient.dtype, device=gradient.device)
    return ordered.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


class AutogradGradients:
    """Gradients as autograd delivered them, in the compute dtype, on their way into an update in backward."""

    def __init__(self, gradients: Mapping[Slot, torch.Tensor], device: ComputeDevice, after: Fence) -> None:
        """``gradients`` have the strides of their parameters (see `in_slot_order`)."""
        self._gradients = {slot.index: (slot, _flat(g)) for slot, g in gradients.items()}
        self._device = device
        self._after = after
        on_host = device.shares_host_memory
        self.num_bytes = sum(g.numel() * g.element_size() for _, g in self._gradients.values()) if on_host else 0

    def slots(self) -> Sequence[Slot]:
        return [slot for slot, _ in self._gradients.values()]

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        return None

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        source = self._gradients[piece.slot.index][1][piece.start : piece.stop]
        if source.device == scratch.device:
            return scratch.copy_(source)
        landing = torch.empty(source.shape, dtype=source.dtype)
        self._device.download(landing, source, self._after)
        return scratch.copy_(landing)

    def release(self) -> None:
        self._gradients.clear()


class _Buffer:
    """The main gradients of one unit in host memory: fp32, element for element like the trainable segment."""

    def __init__(self, unit: Unit, memory: torch.Tensor) -> None:
        self.unit = unit
        self.values = memory[: unit.layout.trainable_numel * _FP32_BYTES].view(torch.float32)

    def view(self, slot: Slot) -> torch.Tensor:
        """The main gradient of one parameter, with its shape and strides."""
        return self.values.as_strided(slot.spec.shape, slot.spec.stride, slot.start)

    def add(self, gradients: Mapping[Slot, torch.Tensor], present: Iterable[int], device: ComputeDevice) -> None:
        """Add in fp32; parameters not in ``present`` have no gradient yet."""
        known = set(present)
        for slot, gradient in gradients.items():
            target = self.view(slot)
            source = gradient.to_dense() if gradient.is_sparse else gradient
            if source.device.type != "cpu":
                landing = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=source.dtype)
                device.download(landing, source, device.mark())
                source = landing
            if slot.index in known:
                target.add_(source)
            else:
                target.copy_(source)


class _MemorySource:
    """Main gradients in RAM, for an update."""

    num_bytes = 0  # the store counts them for good

    def __init__(self, buffer: _Buffer, slots: Sequence[Slot]) -> None:
        self._buffer = buffer
        self._slots = list(slots)

    def slots(self) -> Sequence[Slot]:
        return self._slots

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        return None

    def piece(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        start = piece.slot.start + piece.start
        values = self._buffer.values[start : start + piece.numel]
        return values if values.device == scratch.device else scratch.copy_(values)

    def release(self) -> None: ...


class _SpilledSource:
    """Main gradients on NVMe, for an update."""

    num_bytes = 0

    def __init__(self, swapper: Swapper, extent: Extent, slots: Sequence[Slot]) -> None:
        self._swapper = swapper
        self._extent = extent
        self._slots = list(slots)

    def slots(self) -> Sequence[Slot]:
        return self._slots

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

    def release(self) -> None: ...


class GradientStore:
    """The main gradients of all units: in RAM for the units that the plan names, spilled to NVMe as fp32 for the others."""

    def __init__(self, units: Sequence[Unit], device: ComputeDevice, clock: StepClock, *, in_memory: Iterable[int],
                 open_swapper: Callable[[], Swapper], scratch: FlatPool) -> None:
        """
        Args:
            units: all units, by index.
            device: the compute device.
            clock: counts the waiting.
            in_memory: indices of the units whose gradients stay in RAM.
            open_swapper: gives the swapper to which the others are spilled, at their first use.
            scratch: host memory in which a unit's gradients are summed before they are spilled.
        """
        self._units = list(units)
        self._device = device
        self._clock = clock
        self._in_memory = frozenset(in_memory)
        self._open_swapper = open_swapper
        self._swapper: Swapper | None = None
        self._scratch = scratch
        self._regions: dict[int, AlignedRegion] = {}
        self._buffers: dict[int, _Buffer] = {}
        self._extents: dict[int, Extent] = {}
        self._present: dict[int, set[int]] = {}
        self._spilled_norms: dict[tuple[int, int], torch.Tensor] = {}
        self._writes: list[tuple[Handle, object]] = []

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

    def _memory_of(self, unit: Unit) -> _Buffer:
        if unit.index not in self._buffers:
            region = AlignedRegion(unit.layout.trainable_numel * _FP32_BYTES)
            self._regions[unit.index] = region
            self._buffers[unit.index] = _Buffer(unit, torch.from_numpy(region.array()))
        return self._buffers[unit.index]

    def _add_spilled(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], present: set[int]) -> None:
        swapper, extent = self._spill(unit)
        flat = self._take_scratch(unit.layout.trainable_numel * _FP32_BYTES)
        memory = flat.tensor()
        buffer = _Buffer(unit, memory)
        if present:
            with self._clock.waiting("read"):
                swapper.read(extent, buffer.values).wait()
        else:
            buffer.values.zero_()
        buffer.add(gradients, present, self._device)
        for slot in gradients:
            self._spilled_norms[unit.index, slot.index] = gradient_norm(buffer.view(slot))
        self._writes.append((swapper.write(extent, buffer.values), flat))

    def _spill(self, unit: Unit) -> tuple[Swapper, Extent]:
        return self.reserve(), self._extents[unit.index]

    def _take_scratch(self, num_bytes: int) -> object:
        while True:
            self._writes = [(handle, flat) for handle, flat in self._writes if not self._collect(handle, flat)]
            flat = self._scratch.allocate(num_bytes)
            if flat is not None:
                return flat
            if not self._writes:
                raise RuntimeError(f"the plan's scratch memory for gradients is smaller than {num_bytes} bytes")
            with self._clock.waiting("gradients"):
                self._writes[0][0].wait()

    def _collect(self, handle: Handle, flat: object) -> bool:
        if handle.done():
            handle.wait()
            self._scratch.give_back(flat)
            return True
        return False

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

    def source(self, unit: Unit) -> _MemorySource | _SpilledSource:
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
        """Release the memory."""
        self._buffers.clear()
        for region in self._regions.values():
            region.release()
        self._regions.clear()
        self._writes.clear()


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global 2-norm from the norms per parameter, in the order of the parameter groups. 0-dim fp32 tensor."""
    if not norms:
        return torch.tensor(0.0)
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)


def clip_coefficient(norm: torch.Tensor, maximum: float) -> torch.Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies with. 0-dim fp32 tensor."""
    return torch.clamp(maximum / (norm + 1e-6), max=1.0)

