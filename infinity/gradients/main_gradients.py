"""Main gradients of a unit: their memory, what of them is spilled or arriving, and where an update finds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.device.compute import ComputeDevice, Fence, FlatBuffer, gradient_norms
from infinity.device.download_ring import DownloadRing
from infinity.torch_internals.names import copy_each, outside_modes
from infinity.units.layout import Chunk, ParameterSlice, Slot, in_memory_order, in_slot_order
from infinity.units.unit import Unit
from swapper import Extent, Handle, Priority, Swapper

FP32_BYTES = 4
_BLOCK_NUMEL = 1 << 20  # Elements that are converted or fetched at a time: 4 MiB in fp32.


class GradientSource:
    """The gradients of one unit for one update, and whether that has used them up."""

    needs_scratch = True
    """Whether they come through scratch memory."""
    is_referenced = False
    """Whether others may write to the gradients' memory while the update runs."""

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, *, is_kept: bool = False) -> None:
        self.dtype = dtype
        """The dtype of all of them: fp32, or bf16 if all came in it."""
        self.is_kept = is_kept
        """Whether the gradients stay what they are after the update, which must not change them then."""
        self.values: torch.Tensor | None = None
        """The gradients in memory, if they are there element for element like the trainable segment. Dropped by `release`:
        a view would keep the memory from being unmapped."""
        self.used_bytes = 0
        """Bytes of their memory, from its beginning, that the update has used up, if somebody wants to know it."""
        self.on_release: Callable[[], None] | None = None
        """Called, from any thread, when their memory is free, or more of it."""
        self.slots: Sequence[Slot] = list(slots)
        """The parameters that have a gradient."""
        self._is_released = False

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        """Start to bring the chunk's gradients into ``scratch`` (``dtype``, ``chunk.numel``), if they are not in memory."""
        return None

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        """The gradients of ``slices``, each where it lies in the chunk: 1-D; may be changed in place unless `is_kept`.

        ``scratch`` is that of the chunk, into which `prepare` has brought them.
        """
        return scratch

    def on_used(self, chunk: Chunk) -> None:
        """This chunk's gradients, and all before it, are used up. For the last chunk, `release` is called instead."""
        self.used_bytes = chunk.stop * self.dtype.itemsize  # chunks are retired in order, see `UpdateStream._retire`
        if self.on_release is not None:
            self.on_release()

    def release(self) -> None:
        """The update has used them up, or failed."""
        # Before the callback, which may unmap the memory.
        self.values = None
        self._is_released = True
        if self.on_release is not None:
            self.on_release()

    def is_released(self) -> bool:
        """Whether the memory is free."""
        return self._is_released

    def add_release_callback(self, on_release: Callable[[], None]) -> None:
        """Call ``on_release``, from any thread, when the memory is free, or more of it."""
        self.on_release = on_release


class DeviceGradients(GradientSource):
    """Gradients as autograd delivered them, in the memory of a GPU; the update fetches them slice by slice."""

    def __init__(self, gradients: Mapping[Slot, torch.Tensor], device: ComputeDevice, after: Fence) -> None:
        """``gradients`` have the strides of their parameters (see `in_slot_order`)."""
        dtypes = {gradient.dtype for gradient in gradients.values()}
        # An update reads all gradients of a unit in one dtype: bf16 only if all are.
        super().__init__(list(gradients), dtypes.pop() if dtypes == {torch.bfloat16} else torch.float32)
        self._gradients = {slot.index: in_memory_order(each, slot) for slot, each in gradients.items()}
        self._device = device
        self._after = after

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        fence: Fence = None
        for param_slice in slices:
            source = self._gradients[param_slice.slot.index][param_slice.start : param_slice.stop]
            target = scratch[param_slice.offset : param_slice.offset + param_slice.numel]
            if source.device == scratch.device:
                target.copy_(source)
            else:
                # Behind `after`: the point of the compute stream at which autograd has written them.
                fence = self._device.download(target, source, self._after)
        self._device.synchronize(fence)  # of one stream: with the last all are there
        return scratch

    def release(self) -> None:
        self._gradients.clear()
        super().release()


class SpillingWrite(GradientSource):
    """Gradients on their way to NVMe, in memory that the write reads until it has ended."""

    def __init__(self, handle: Handle, dtype: torch.dtype) -> None:
        super().__init__((), dtype)
        self._handle = handle
        handle.add_done_callback(lambda _: self.release())

    def is_released(self) -> bool:
        return self._handle.done()  # before the callback, maybe


class GradientBuffer:
    """The main gradients of one unit in memory, fp32 or bf16, element for element like the trainable segment."""

    @outside_modes
    def __init__(self, unit: Unit, flat: FlatBuffer, dtype: torch.dtype = torch.float32) -> None:
        self.flat = flat
        self.values = flat.tensor()[: unit.layout.trainable_numel * dtype.itemsize].view(dtype)
        self.dtype = dtype
        """fp32 or bf16."""
        segment = unit.layout.trainable
        self._views = {
            slot.index: self.values.as_strided(slot.spec.shape, slot.spec.stride, slot.start)
            for slot in (() if segment is None else segment.slots)
        }
        """By slot index, see `view`. Each is used several times a step, and making it costs as much as a small copy."""
        self._reference: weakref.ref[Any] | None = None

    def fill(self, read: Callable[[torch.Tensor], Handle], stored: torch.dtype) -> None:
        """Let ``read`` bring values of dtype ``stored`` into the memory, which then become this buffer's.

        Args:
            read: starts a read into a tensor.
            stored: the buffer's dtype, or bf16 for a buffer of fp32.
        """
        # Where the drive's bytes are put: the buffer itself, or its front half for bf16 that is widened in place.
        landing = self.values if stored == self.dtype else self.values.view(stored)[: self.values.numel()]
        read(landing).wait()
        if stored != self.dtype:
            # bf16 values were read into the first half of the fp32 memory, and are widened in place, from the end: each
            # target is behind all that is yet to be read. Example, 3 blocks in bytes 0..6M: block 2 becomes 8..12M,
            # block 1 4..8M, block 0 0..4M. Block 0 overlaps itself: so each is cloned.
            numel = landing.numel()
            for start in range((numel - 1) // _BLOCK_NUMEL * _BLOCK_NUMEL, -1, -_BLOCK_NUMEL):
                stop = min(start + _BLOCK_NUMEL, numel)
                self.values[start:stop] = landing[start:stop].clone()

    def view(self, slot: Slot) -> torch.Tensor:
        """The main gradient of one parameter, with its shape and strides."""
        return self._views[slot.index]

    def norms(self, slots: Sequence[Slot]) -> dict[int, torch.Tensor]:
        """Slot index -> 2-norm of the parameter's gradient (0-dim fp32)."""
        indices = [slot.index for slot in slots]
        return dict(zip(indices, gradient_norms([self._views[index] for index in indices]), strict=True))

    @outside_modes
    def tracked_view(self, slot: Slot) -> torch.Tensor:
        """As `view`, for others to keep: `is_referenced` as long as they hold it, or anything that looks at the same memory."""
        memory, self._reference = self.flat.tracked_tensor(self._reference)
        values = memory[: self.values.numel() * self.dtype.itemsize].view(self.dtype)
        return values.as_strided(slot.spec.shape, slot.spec.stride, slot.start)

    @property
    def is_referenced(self) -> bool:
        """Whether somebody holds what `tracked_view` gave."""
        return self._reference is not None and self._reference() is not None

    def add(self, gradients: Mapping[Slot, torch.Tensor], present: Iterable[int], landing: DownloadRing[Any]) -> None:
        """Add in fp32, and round to the buffer's dtype; parameters not in ``present`` have no gradient yet.

        Gradients on a device reach a buffer in host memory through ``landing``, a ring of pinned memory. This waits for
        the copies.
        """
        # A slot without a gradient holds bytes of an earlier step: the first gradient replaces them.
        known, is_on_cpu, first = set(present), self.values.is_cpu, dict[Slot, torch.Tensor]()
        for slot, gradient in gradients.items():
            if is_on_cpu and gradient.is_cpu and slot.index not in known:
                is_plain = gradient.layout is torch.strided and not gradient.requires_grad
                is_usual = is_plain and gradient.shape == slot.spec.shape
                first[slot] = gradient if is_usual else in_slot_order(gradient.detach(), slot)
        if first:
            copy_each([self._views[slot.index] for slot in first], [*first.values()])
        for slot, gradient in gradients.items():
            if slot in first:
                continue
            source, target = in_memory_order(gradient, slot), self.values[slot.start : slot.stop]
            is_new = slot.index not in known
            if not is_on_cpu:  # each element is converted when it is added
                source = source.to(target.device)
                target.copy_(source) if is_new else target.add_(source)
                continue
            # torch adds bf16 and fp32 in fp32. It converts an operand as a whole: block by block that is bounded.
            blocks: Iterable[tuple[int, torch.Tensor]]
            if source.device.type == "cpu":
                blocks = zip(range(0, source.numel(), _BLOCK_NUMEL), source.split(_BLOCK_NUMEL), strict=False)
            else:
                blocks = landing.blocks(source, _BLOCK_NUMEL)
            for start, values in blocks:
                place = target[start : start + values.numel()]
                if is_new:
                    place.copy_(values)
                else:
                    place.add_(values)


class MemoryGradients(GradientSource):
    """Main gradients in RAM, for an update."""

    needs_scratch = False

    def __init__(self, buffer: GradientBuffer, slots: Sequence[Slot], *, is_kept: bool = False) -> None:
        super().__init__(slots, buffer.values.dtype, is_kept=is_kept)
        self.is_referenced = buffer.is_referenced
        self.values = buffer.values

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        if self.values is None:
            raise RuntimeError("the gradients have been released")
        values = self.values[chunk.start : chunk.stop]
        return values if values.device == scratch.device else scratch.copy_(values)


class SpilledGradients(GradientSource):
    """Main gradients on NVMe, for an update."""

    def __init__(
        self, swapper: Swapper, extent: Extent, slots: Sequence[Slot], dtype: torch.dtype, *, is_kept: bool = False
    ) -> None:
        super().__init__(slots, dtype, is_kept=is_kept)
        self._swapper = swapper
        self._extent = extent

    def prepare(self, chunk: Chunk, scratch: torch.Tensor) -> Handle | None:
        # The extent has the order of the trainable segment, as chunks do: a chunk is one contiguous read.
        offset = chunk.start * self.dtype.itemsize
        if scratch.device.type == "cpu":
            return self._swapper.read(self._extent, scratch, offset=offset, priority=Priority.PREFETCH)
        # Records on a device: by way of host memory. The copy must end before that is freed, so nothing is left to wait
        # for.
        landing = torch.empty(scratch.shape, dtype=scratch.dtype, device="cpu")
        self._swapper.read(self._extent, landing, offset=offset).wait()
        scratch.copy_(landing)
        return None


@dataclass(slots=True, eq=False)
class UnitGrads:
    """The state of one unit's main gradients. Touched under the engine lock only."""

    unit: Unit
    """The unit. Never changes."""
    stays_in_ram: bool
    """Whether they stay in RAM: as the plan says, until they become wider than there is room for."""
    buffer: GradientBuffer | None = None
    """Their memory, until `detach_buffer`: for good if they stay, else for as long as there is room."""
    is_unchanged: bool = False
    """Whether what is spilled is what is in `buffer`: from a look at them until `on_change`, or the buffer's end."""
    number: int = 0
    """Counts the buffers of all units that were taken for a time: the smallest number was taken first."""
    extent: Extent | None = None
    """Where they are spilled. Allocated once, at the first spill."""
    spilled_dtype: torch.dtype | None = None
    """The dtype in which they are spilled; None when they are used up."""
    spilled_span: tuple[int, int] | None = None
    """Elements [start, stop) that alone were spilled, the last time; None: all."""
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    """Slot index -> 2-norm of what is spilled, or of what nobody but the store can have changed in RAM. Kept beyond that, it
    would pass for the norm of later gradients."""
    present: set[int] = field(default_factory=set)
    """Indices of slots with a gradient: from the first one that is added until all are used up or dropped."""
    zeros: set[int] = field(default_factory=set)
    """Indices of others, whose gradient is zero and not written as such yet."""
    is_unscaled: bool = False
    """Whether they have been divided by the loss scale: from the first look at them until they are used up or dropped."""

    def slots(self) -> list[Slot]:
        """The parameters that have a gradient in memory or on NVMe."""
        return [slot for slot in self.unit.layout.slots if slot.index in self.present]

    def on_change(self) -> None:
        """The gradients in memory have changed, or will: spilled values and norms are outdated."""
        self.is_unchanged = False
        self.norms.clear()

    def detach_buffer(self) -> GradientBuffer:
        """The unit's memory, which is the caller's from now on."""
        if self.buffer is None:
            raise RuntimeError(f"the gradients of unit {self.unit.name} are in no memory")
        buffer, self.buffer, self.is_unchanged = self.buffer, None, False
        return buffer

    def update_norms(
        self, norms: Mapping[int, torch.Tensor], gradients: Mapping[Slot, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """Gradients were added, so what was known is over; their own ``norms`` count where nothing was there before, or is
        lost in ``dtype``."""
        # A norm of a sum does not follow from the norms of its terms.
        for slot, gradient in gradients.items():
            self.norms.pop(slot.index, None)
            is_exact = dtype in (torch.float32, gradient.dtype)
            if is_exact and slot.index in norms and slot.index not in self.present:
                self.norms[slot.index] = norms[slot.index]

    def drop(self, slots: set[int]) -> None:
        """Forget these slots' gradients. With the last one, the unit's dtype and scale are forgotten, too."""
        self.present -= slots
        self.zeros -= slots
        for index in slots:
            self.norms.pop(index, None)
        if not self.present and not self.zeros:  # the next gradients come with the scale, in a dtype of their own
            self.spilled_dtype, self.is_unscaled = None, False


@dataclass(frozen=True)
class MainGradDtype:
    """The dtype in which gradients wait for their update."""

    dtype: torch.dtype = torch.float32
    """fp32, or bf16 if that is the compute dtype."""
    rounds: bool = False
    """Whether the sum of several gradients may be rounded to ``dtype``. Without, it is kept as fp32."""

    def after(
        self, current: torch.dtype, gradients: Mapping[Slot, torch.Tensor], present: Container[int]
    ) -> torch.dtype:
        """What a unit's gradients of dtype ``current`` have to become when ``gradients`` are added to them."""
        if self.rounds or current == torch.float32:
            return current
        # bf16 stays exact if nothing has to be added to it.
        is_exact = all(g.dtype == current and slot.index not in present for slot, g in gradients.items())
        return current if is_exact else torch.float32


@dataclass(frozen=True)
class Delivery:
    """Gradients of one unit that came together."""

    grads: UnitGrads
    slots: list[list[Slot]]
    """The slots whose gradients each tensor of the download holds, in order."""
    norms: Mapping[int, torch.Tensor]
    """Slot index -> 2-norm, of some of them."""


class Arrivals(DownloadRing[Delivery]):
    """Where gradients arrive, in the order in which they came: one copy for a unit and dtype.

    That they are added in this order, and when, is the business of whoever takes them.
    """

    def start_unit(
        self, grads: UnitGrads, gradients: Mapping[Slot, torch.Tensor], norms: Mapping[int, torch.Tensor]
    ) -> None:
        """Start to bring the unit's ``gradients``, which are the caller's own and in the order of their slots, and fit."""
        flats = {slot: in_memory_order(gradient, slot) for slot, gradient in gradients.items()}
        dtypes = dict.fromkeys(flat.dtype for flat in flats.values())
        slots = [[slot for slot, flat in flats.items() if flat.dtype == dtype] for dtype in dtypes]
        # Concatenated on the device: one copy to the host in place of one per parameter.
        sources = [torch.cat([flats[slot] for slot in each]) if len(each) > 1 else flats[each[0]] for each in slots]
        self.start(sources, Delivery(grads, slots, norms))

    def slots_of(self, grads: UnitGrads) -> set[int]:
        """Indices of slots of which a gradient is on its way."""
        deliveries = [download.purpose for download in self.coming]
        return {slot.index for each in deliveries if each.grads is grads for slots in each.slots for slot in slots}

    def pop_gradients(self) -> tuple[Delivery, dict[Slot, torch.Tensor]]:
        """Take the first ones out: with shape and strides of their parameters, until the next are started."""
        download = self.pop_first()
        landed: dict[Slot, torch.Tensor] = {}
        for slots, values in zip(download.purpose.slots, download.values, strict=True):
            for slot, part in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
                landed[slot] = part.as_strided(slot.spec.shape, slot.spec.stride, part.storage_offset())
        return download.purpose, landed

    def forget(self) -> None:
        """Drop all gradients that are on their way."""
        while self.coming:
            self.pop_first()
