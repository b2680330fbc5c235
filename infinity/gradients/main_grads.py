"""Main gradients: what autograd delivers, kept until the update.

Knows units and gradients; must not know when a unit is complete (`infinity.gradients.collector`) or how it is updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import torch

from infinity.device.compute import ComputeDevice, FlatBuffer, gradient_norm
from infinity.device.flat_pool import FlatPool
from infinity.gradients.listener import GradientListener
from infinity.gradients.loss_scaler import LossScaler
from infinity.gradients.main_grad_dtype import MainGradDtype
from infinity.gradients.sources import (
    FP32_BYTES,
    DeviceGradients,
    GradientBuffer,
    GradientSource,
    Loan,
    MemoryGradients,
    SpilledGradients,
    SpillingWrite,
    in_slot_order,
)
from infinity.telemetry.clock import StepClock
from infinity.threads.interrupts import POLL_SECONDS
from infinity.tiers.extent_labels import gradient_contents
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from swapper import Bell, Extent, Swapper

_MOST_UNITS_ON_DEVICE = 2
"""Units whose gradients may wait in a GPU's memory for their update."""


class MainGradStore:
    """The main gradients of all units, in one pool of host memory.

    Kept until the step (`add`): in RAM for the units that the plan names, spilled to NVMe for the others.
    On their way into an update in backward (`hand_over`): in RAM until the update has used them up.

    [Note: gradients that become wider] A single bf16 gradient loses nothing as bf16, and the plan counts on that where a
    step has one micro-batch. Whoever calls ``loss.backward()`` several times all the same, or looks at ``parameter.grad``,
    gets fp32: the unit's memory is exchanged for one of twice the size if the pool has it to spare, and otherwise its
    gradients go to NVMe.

    [Note: gradients that are looked at] What is spilled comes back into memory for that, unit by unit, until somebody needs
    the room; it is written again if it was changed (`show`). Memory over which the user holds a tensor is his from the
    moment on in which it would be used for something else: the store takes other memory instead.
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
        waiting: MainGradDtype | None = None,
        scaler: LossScaler | None = None,
        listener: Callable[[], GradientListener] = GradientListener,
    ) -> None:
        """
        Args:
            units: all units, by index.
            device: the compute device.
            clock: counts the waiting.
            in_memory: indices of the units whose gradients stay in RAM.
            open_swapper: gives the swapper to which the others are spilled, at their first use.
            pool: host memory for all of it.
            waiting: in which dtype they wait; fp32 by default.
            scaler: knows with which factor gradients come; None: with none.
            listener: gives who is told when gradients are replaced or dropped.
        """
        self._units = list(units)
        self._device = device
        self._clock = clock
        self._in_memory = set(in_memory)
        self._open_swapper = open_swapper
        self._swapper: Swapper | None = None
        self._pool = pool
        self._buffers: dict[int, GradientBuffer] = {}
        self._extents: dict[int, Extent] = {}
        self._waiting = waiting or MainGradDtype()
        sizes = [unit.layout.trainable_numel * FP32_BYTES for unit in self._units]
        fits_wide = sum(sizes) <= pool.capacity_bytes and not self._waiting.rounds
        self._kept_dtype = torch.float32 if fits_wide else self._waiting.dtype
        self._scratch_bytes = max(sizes, default=0)
        self._present: dict[int, set[int]] = {}
        self._spilled_dtypes: dict[int, torch.dtype] = {}
        self._spilled_norms: dict[tuple[int, int], torch.Tensor] = {}
        self._loans: deque[tuple[Loan, FlatBuffer | None]] = deque()
        self._ended = Bell()
        """Rung when a loan ends."""
        self._sums: dict[int, GradientBuffer] = {}
        """Of units to be spilled, while several micro-batches' gradients come one after the other."""
        self._unchanged: set[int] = set()
        """Of `_sums`, those that are spilled as they are."""
        self._zeros: dict[int, set[int]] = {}
        """By unit, gradients that are zero and were not written as such yet."""
        self._unscaled: set[int] = set()
        """Units whose gradients have been divided by the loss scale."""
        self.scaler = scaler or LossScaler(None)
        """Knows the factor with which gradients come."""
        self._listener = listener
        self.resumed_bytes = 0
        """Bytes read so far to add to sums that had been spilled before."""

    def reserve(self) -> None:
        """Allocate the extents for spilled gradients, if that has not happened yet."""
        for unit in self._units:
            if unit.layout.trainable_numel and unit.index not in self._in_memory:
                self._spill(unit)

    def _spill(self, unit: Unit) -> tuple[Swapper, Extent]:
        if self._swapper is None:
            self._swapper = self._open_swapper()
        if unit.index not in self._extents:
            # As large as they may become.
            itemsize = self._waiting.dtype.itemsize if self._waiting.rounds else FP32_BYTES
            num_bytes = unit.layout.trainable_numel * itemsize
            name_of = gradient_contents(
                unit.layout, lambda: self._spilled_dtypes.get(unit.index, torch.float32).itemsize
            )
            self._extents[unit.index] = self._swapper.allocate(num_bytes, f"gradients of {unit.name}", name_of=name_of)
        return self._swapper, self._extents[unit.index]

    @property
    def has_any(self) -> bool:
        """Whether any main gradient is kept."""
        return any(self._present.values()) or any(self._zeros.values())

    def slots_with_gradient(self, unit: Unit) -> list[Slot]:
        """The parameters of the unit that have a main gradient."""
        present = self._present.get(unit.index, set()) | self._zeros.get(unit.index, set())
        return [slot for slot in unit.layout.slots if slot.index in present]

    def is_spilled(self, unit: Unit) -> bool:
        """Whether the unit's main gradients go to NVMe."""
        return unit.index not in self._in_memory

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Main gradients += ``gradients`` (any floating dtype), in fp32."""
        if unit.index in self._unscaled:
            gradients = {slot: gradient.float() * (1.0 / self.scaler.scale) for slot, gradient in gradients.items()}
        self._add(unit, gradients)

    def _add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        present = self._present.setdefault(unit.index, set())
        if unit.index in self._zeros:
            self._zeros[unit.index].difference_update(slot.index for slot in gradients)
        if unit.index in self._in_memory:
            needed = self._waiting.after(self._memory_of(unit).dtype, gradients, present)
            if needed == self._memory_of(unit).dtype or self.widen(unit):
                self._memory_of(unit).add(gradients, present, self._device)
        if unit.index not in self._in_memory:
            self._add_spilled(unit, gradients, present)
        present.update(slot.index for slot in gradients)

    def widen(self, unit: Unit) -> bool:
        """Keep the unit's gradients in RAM as what may be changed at will: fp32, unless sums are to be rounded.

        Returns False if they are on NVMe, or have to go there for want of room.
        """
        if unit.index not in self._in_memory:
            return False
        narrow = self._memory_of(unit)
        if narrow.dtype == torch.float32 or self._waiting.rounds:
            return True
        num_bytes = unit.layout.trainable_numel * FP32_BYTES
        if self._committed_bytes() + num_bytes <= self._pool.capacity_bytes:
            wide = GradientBuffer(unit, self._take(num_bytes))
            wide.values.copy_(narrow.values)
            self._buffers[unit.index] = wide
            self._pool.give_back(narrow.flat)
            return True
        self._write(unit, narrow, self.slots_with_gradient(unit))
        self._in_memory.remove(unit.index)
        del self._buffers[unit.index]
        return False

    def _committed_bytes(self) -> int:
        """Memory that the plan counts on: of all units that stay in RAM, and scratch for one that does not."""
        kept = sum(
            self._buffers[index].flat.num_bytes
            if index in self._buffers
            else self._units[index].layout.trainable_numel * self._kept_dtype.itemsize
            for index in self._in_memory
        )
        return kept + self._scratch_bytes

    def hand_over(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        """Main gradients += ``gradients``, and all of the unit's go to an update that runs next.

        The 2-norm of each parameter's gradient is put into ``norms``, by (unit index, slot index).
        """
        self._write_zeros(unit, gradients)
        self._tell_of_end(unit)
        present = self._present.get(unit.index)
        if unit.index in self._in_memory and (present or unit.index in self._buffers):
            self.add(unit, gradients)
            slots = self.slots_with_gradient(unit)
            for slot in slots:
                norms[unit.index, slot.index] = self.norm_of(unit, slot)
            self._present.pop(unit.index, None)
            # Afterwards its memory is for whoever comes next: kept for this unit, it would lie idle until next time.
            return self._lend_to_update(self._buffers.pop(unit.index), slots)
        if not present and not self._device.shares_host_memory:
            return self._leave_on_device(unit, gradients, norms)
        buffer = self._sum(unit, gradients, present or set())
        slots = [slot for slot in unit.layout.slots if slot in gradients or slot.index in (present or ())]
        self._forget_spilled(unit, slots)
        self._present.pop(unit.index, None)
        for slot in slots:
            norms[unit.index, slot.index] = gradient_norm(buffer.view(slot))
        return self._lend_to_update(buffer, slots)

    def _lend_to_update(self, buffer: GradientBuffer, slots: Sequence[Slot]) -> GradientSource:
        source = MemoryGradients(buffer, slots)
        flat = self._surrender(buffer)
        if flat is not None:
            self._lend(source, flat)
        return source

    def _surrender(self, buffer: GradientBuffer) -> FlatBuffer | None:
        """The memory of a buffer that is not needed any more. None if the user holds tensors over it, whose it is then."""
        if not buffer.is_lent:
            return buffer.flat
        self._pool.let_go(buffer.flat)
        return None

    def _give_back(self, buffer: GradientBuffer) -> None:
        flat = self._surrender(buffer)
        if flat is not None:
            self._pool.give_back(flat)

    def _leave_on_device(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        ordered = {slot: in_slot_order(gradient, slot) for slot, gradient in gradients.items()}
        for slot, gradient in ordered.items():
            norms[unit.index, slot.index] = gradient_norm(gradient)
        while sum(flat is None for _, flat in self._loans) >= _MOST_UNITS_ON_DEVICE:
            self._await_loan()
        source = DeviceGradients(ordered, self._device, self._device.mark())
        self._lend(source, None)
        return source

    def open_sum(self, unit: Unit) -> None:
        """What is added to a unit from now on is summed in memory until `close_sum` or `hand_over`, or room gets scarce."""
        if unit.index not in self._in_memory and unit.index not in self._sums:
            is_wide = not self._waiting.rounds  # several gradients will be added
            self._sums[unit.index] = self._sum(unit, {}, self._present.get(unit.index, set()), is_wide=is_wide)

    def close_sum(self, unit: Unit) -> None:
        """Spill what `open_sum` kept in memory, if it did."""
        buffer = self._sums.pop(unit.index, None)
        if buffer is None:
            return
        if unit.index in self._unchanged:
            self._unchanged.discard(unit.index)
            self._give_back(buffer)
        else:
            self._write(unit, buffer, self._present_slots(unit))

    def _present_slots(self, unit: Unit) -> list[Slot]:
        present = self._present.get(unit.index, set())
        return [slot for slot in unit.layout.slots if slot.index in present]

    def _write_zeros(self, unit: Unit, besides: Container[Slot] = ()) -> None:
        """Gradients that are zero become gradients like any other, but for those in ``besides``, to which some are added."""
        zeros = self._zeros.pop(unit.index, None)
        if zeros:
            slots = [slot for slot in unit.layout.slots if slot.index in zeros and slot not in besides]
            if unit.index not in self._in_memory:
                self.open_sum(unit)
            for slot in slots:
                self._add(
                    unit, {slot: torch.zeros((), dtype=self._waiting.dtype, device="cpu").expand(slot.spec.shape)}
                )

    def _tell_of_end(self, unit: Unit) -> None:
        present = self._present_slots(unit)
        if present:
            self._listener().note_end(unit, present)

    def _sum(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], present: set[int], *, is_wide: bool = False
    ) -> GradientBuffer:
        """What is spilled of the unit plus ``gradients``, in fresh memory."""
        known = self._sums.pop(unit.index, None)
        self._unchanged.discard(unit.index)
        if known is not None:
            known.add(gradients, present, self._device)
            return known
        stored = self._spilled_dtypes[unit.index] if present else self._waiting.dtype
        dtype = torch.float32 if is_wide else self._waiting.after(stored, gradients, present)
        buffer = GradientBuffer(unit, self._take(unit.layout.trainable_numel * dtype.itemsize), dtype)
        try:
            if present:
                swapper, extent = self._spill(unit)
                with self._clock.waiting("read"):
                    buffer.fill(lambda target: swapper.read(extent, target), stored)
                self.resumed_bytes += buffer.flat.num_bytes
            buffer.add(gradients, present, self._device)
        except BaseException:
            self._pool.give_back(buffer.flat)
            raise
        return buffer

    def _memory_of(self, unit: Unit) -> GradientBuffer:
        if unit.index not in self._buffers:
            flat = self._take(unit.layout.trainable_numel * self._kept_dtype.itemsize)
            self._buffers[unit.index] = GradientBuffer(unit, flat, self._kept_dtype)
        return self._buffers[unit.index]

    def _add_spilled(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], present: set[int]) -> None:
        if unit.index in self._sums:
            self._unchanged.discard(unit.index)
            self._sums[unit.index].add(gradients, present, self._device)
            return
        self._write(unit, self._sum(unit, gradients, present), gradients)

    def _write(self, unit: Unit, buffer: GradientBuffer, changed: Iterable[Slot]) -> None:
        """Spill all of ``buffer``, of which the gradients in ``changed`` are other ones than were spilled before."""
        swapper, extent = self._spill(unit)
        for slot in changed:
            self._spilled_norms[unit.index, slot.index] = gradient_norm(buffer.view(slot))
        self._spilled_dtypes[unit.index] = buffer.dtype
        handle = swapper.write(extent, buffer.values)
        if buffer.is_lent:
            handle.wait()  # afterwards it is the user's, who may write to it
            self._surrender(buffer)
        else:
            self._lend(SpillingWrite(handle), buffer.flat)

    def _take(self, num_bytes: int) -> FlatBuffer:
        self._retire()
        while True:
            flat = self._pool.allocate(num_bytes)
            if flat is not None:
                return flat
            closable = next((index for index, buffer in self._sums.items() if not buffer.is_lent), None)
            if not self._loans and closable is not None:
                self.close_sum(self._units[closable])
            elif not self._loans and self._sums:
                return self._pool.allocate_beyond(num_bytes)
            elif not self._loans:
                if not self._pool.reclaim() and not self._pool.awaits_requests():
                    raise RuntimeError(f"the plan's memory for gradients has no room for {num_bytes} bytes")
                continue
            self._await_loan()

    def _retire(self, *, in_parts: bool = False) -> bool:
        """Take back what is free again, ``in_parts``: of what is still in use, too; return whether anything was."""
        num_loans = len(self._loans)
        made_room = False
        for _ in range(num_loans):
            loan, flat = self._loans.popleft()
            if not loan.is_released():
                self._loans.append((loan, flat))
                if in_parts and flat is not None:
                    made_room |= self._pool.give_back_front(flat, loan.used_bytes)
            elif flat is not None:
                self._pool.give_back(flat)
        return made_room or len(self._loans) < num_loans

    def _lend(self, loan: Loan, flat: FlatBuffer | None) -> None:
        loan.tell(self._ended.ring)
        self._loans.append((loan, flat))

    def _await_loan(self) -> None:
        """Return when a loan has ended, whichever ends first, or a part of one, and that memory is back."""
        with self._clock.waiting("gradients"):
            while True:
                if self._retire(in_parts=True) or not self._loans:
                    return
                self._ended.wait(POLL_SECONDS)  # so that a KeyboardInterrupt gets through

    def norm_of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """2-norm of one parameter's whole main gradient: 0-dim fp32."""
        self._write_zeros(unit)
        if unit.index in self._in_memory:
            return gradient_norm(self._memory_of(unit).view(slot))
        self.close_sum(unit)
        return self._spilled_norms[unit.index, slot.index]

    def source(self, unit: Unit, *, keeps: bool = False) -> GradientSource:
        """The unit's main gradients for an update, which must be the next to use them.

        Args:
            unit: whose.
            keeps: they stay what they are. Otherwise they count as gone from now on.
        """
        self._write_zeros(unit)
        if not keeps:
            self._tell_of_end(unit)
        self.close_sum(unit)
        slots = self._present_slots(unit)
        if not keeps:
            self._present.pop(unit.index, None)
            self._unscaled.discard(unit.index)
        if unit.index in self._in_memory:
            buffer = self._memory_of(unit)
            if buffer.is_lent and not keeps:
                del self._buffers[unit.index]
                self._pool.let_go(buffer.flat)
            return MemoryGradients(buffer, slots, is_kept=keeps)
        swapper, extent = self._spill(unit)
        dtype = self._spilled_dtypes[unit.index] if keeps else self._forget_spilled(unit, slots)
        return SpilledGradients(swapper, extent, slots, dtype, is_kept=keeps)

    def _forget_spilled(self, unit: Unit, slots: Iterable[Slot]) -> torch.dtype:
        """What is spilled is used up: a norm kept beyond that would pass for that of later gradients. Returns its dtype."""
        for slot in slots:
            self._spilled_norms.pop((unit.index, slot.index), None)
        return self._spilled_dtypes.pop(unit.index, self._waiting.dtype)

    def clear(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Forget all main gradients but for those ``kept``, by (unit index, slot index); the memory stays reserved."""
        for index, present in self._present.items():
            gone = [slot for slot in self._present_slots(self._units[index]) if (index, slot.index) not in kept]
            if gone:
                self._listener().note_end(self._units[index], gone)
            present.difference_update(slot.index for slot in gone)
            for slot in gone:
                self._spilled_norms.pop((index, slot.index), None)
        for index, zeros in self._zeros.items():
            zeros.intersection_update(slot for unit, slot in kept if unit == index)
        for index in [index for index, present in self._present.items() if not present]:
            del self._present[index]
        for index in [index for index, zeros in self._zeros.items() if not zeros]:
            del self._zeros[index]
        left = {*self._present, *self._zeros}
        self._unscaled &= left
        for index in self._spilled_dtypes.keys() - left:
            del self._spilled_dtypes[index]
        for index in [index for index, buffer in self._buffers.items() if buffer.is_lent and index not in left]:
            self._pool.let_go(self._buffers.pop(index).flat)
        for index in self._sums.keys() - left:
            self._give_back(self._sums.pop(index))
        self._unchanged &= left

    def close(self) -> None:
        """Give the memory back."""
        for _, flat in self._loans:
            if flat is not None:
                self._pool.give_back(flat)
        for buffer in [*self._buffers.values(), *self._sums.values()]:
            self._give_back(buffer)
        self._loans.clear()
        self._buffers.clear()
        self._sums.clear()


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global 2-norm from the norms per parameter, in the order of ``model.parameters()``. 0-dim fp32 tensor."""
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    first = norms[0].device
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)
    return norm


def clip_coefficient(norm: torch.Tensor, maximum: float) -> torch.Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies with. 0-dim fp32 tensor."""
    return torch.clamp(maximum / (norm + 1e-6), max=1.0)
