"""Main gradients: what autograd delivers, kept until the update, and shown to whoever looks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from types import MappingProxyType

import torch

from infinity.device.compute import ComputeDevice, FlatBuffer, gradient_norms
from infinity.device.flat_pool import FlatPool
from infinity.gradients.held_gradients import HeldGradients
from infinity.gradients.loss_scaler import LossScaler
from infinity.gradients.main_gradients import (
    FP32_BYTES,
    Arrivals,
    DeviceGradients,
    GradientBuffer,
    GradientSource,
    MainGradDtype,
    MemoryGradients,
    SpilledGradients,
    SpillingWrite,
    UnitGrads,
)
from infinity.metrics.clock import StepClock
from infinity.tiers.extent_labels import gradient_contents
from infinity.units.layout import Slot, in_slot_order
from infinity.units.unit import Unit
from swapper import Bell, Extent, Swapper
from swapper.sync.interrupts import POLL_SECONDS

_MOST_UNITS_ON_DEVICE = 2  # Units whose gradients wait in GPU memory for their update. For a third, backward waits.


@dataclass(eq=False, repr=False)
class GradientStore:
    """The main gradients of all units, in one pool of memory: the host's, or a device's that updates there.

    Kept until the step (`add`): in RAM for the units that the plan names, spilled to NVMe for the others.
    On their way into an update in backward (`add_for_update`): in RAM until the update has used them up.
    For the training thread, under the engine lock; only uses of memory end on other threads.

    Args:
        in_memory: indices of the units whose gradients stay in RAM.
        open_swapper: gives the swapper to which the others are spilled, at their first use.
        pool: memory for all of it; of a device only where no unit's are spilled.
        arrivals: where gradients arrive from a device with a memory of its own; of no bytes for another one.
        main_dtype: in which dtype they wait.
    """

    units: InitVar[Sequence[Unit]]
    _device: ComputeDevice
    _clock: StepClock
    _: KW_ONLY
    in_memory: InitVar[Iterable[int]]
    open_swapper: Callable[[], Swapper]
    pool: FlatPool
    arrivals: Arrivals
    main_dtype: MainGradDtype = field(default_factory=MainGradDtype)
    scaler: LossScaler = field(default_factory=lambda: LossScaler(None))
    resumed_bytes: int = field(init=False, default=0)
    """Read so far, to add to sums that had been spilled before."""

    def __post_init__(self, units: Sequence[Unit], in_memory: Iterable[int]) -> None:
        kept = set(in_memory)
        self._grads = [UnitGrads(unit, stays_in_ram=unit.index in kept) for unit in units]
        self._swapper: Swapper | None = None  # opened when the first gradients are spilled
        sizes = [unit.layout.trainable_numel * FP32_BYTES for unit in units]
        # If the pool holds all units in fp32, bf16 gradients are widened when they come: later ones need no wider
        # memory.
        fits_wide = sum(sizes) <= self.pool.capacity_bytes and not self.main_dtype.rounds
        self._kept_dtype = torch.float32 if fits_wide else self.main_dtype.dtype
        self._scratch_bytes = max(sizes, default=0)
        self._numbers = itertools.count()  # for `UnitGrads.number`
        self._memory_uses: deque[tuple[GradientSource, FlatBuffer | None]] = deque()
        """Memory that an update or a write uses, each until `_retire` finds that this has ended; None: not of the pool."""
        self._ended = Bell()  # rung when a use of memory ends, by a thread of the update stream or the swapper
        self.held = HeldGradients()  # tensors that scripts got from, or assigned to, ``parameter.grad``

    def _after_arrivals(self, unit: Unit) -> UnitGrads:
        """The unit's gradients, after all that were on their way have been added."""
        grads = self._grads[unit.index]
        if self.arrivals.coming:
            self._wait_for_arrivals(grads)
        return grads

    def reserve(self) -> None:
        """Allocate the extents for spilled gradients, if that has not happened yet."""
        for grads in self._grads:
            if grads.unit.layout.trainable_numel and not grads.stays_in_ram:
                self._spill(grads)

    def _spill(self, grads: UnitGrads) -> tuple[Swapper, Extent]:
        if self._swapper is None:
            self._swapper = self.open_swapper()
        if grads.extent is None:
            # As large as they may become.
            layout, itemsize = (
                grads.unit.layout,
                self.main_dtype.dtype.itemsize if self.main_dtype.rounds else FP32_BYTES,
            )
            name_of = gradient_contents(layout, lambda: (grads.spilled_dtype or torch.float32).itemsize)
            grads.extent = self._swapper.allocate(
                layout.trainable_numel * itemsize, f"gradients of {grads.unit.name}", name_of=name_of
            )
        return self._swapper, grads.extent

    @property
    def has_any(self) -> bool:
        """Whether any main gradient is kept."""
        return len(self.arrivals.coming) > 0 or any(grads.present or grads.zeros for grads in self._grads)

    def slots_with_gradient(self, unit: Unit) -> list[Slot]:
        """The parameters of the unit that have a main gradient."""
        grads = self._grads[unit.index]
        found = grads.present | grads.zeros
        if self.arrivals.coming:
            found |= self.arrivals.slots_of(grads)
        return [slot for slot in unit.layout.slots if slot.index in found] if found else []

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Main gradients += ``gradients`` (any floating dtype), in fp32. From a GPU they may arrive later."""
        grads = self._grads[unit.index]
        # Somebody has looked at the unit's gradients, which took the scale out: new ones must match.
        if grads.is_unscaled:
            gradients = {slot: gradient.float() * (1.0 / self.scaler.scale) for slot, gradient in gradients.items()}
        if self._device.uses_host_memory or self.pool.torch_device.type != "cpu":
            self._add(grads, gradients)
            return
        apart = {slot: gradient for slot, gradient in gradients.items() if gradient.device.type != "cpu"}
        if apart:
            self._start_download(grads, apart)
        here = {slot: gradient for slot, gradient in gradients.items() if slot not in apart}
        if here:
            self._wait_for_arrivals(grads)
            self._add(grads, here)

    def _start_download(self, grads: UnitGrads, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Start to copy gradients from the device into the ring of pinned memory."""
        # They are added, in the order in which they came, when the unit's are needed or the ring is full: until then
        # the training thread does not wait for the GPU. One copy for each dtype of the unit.
        known = grads.present | self.arrivals.slots_of(grads)
        ordered = {slot: in_slot_order(gradient.detach(), slot) for slot, gradient in gradients.items()}
        # The norm of a first gradient is taken on the GPU. It holds until others are added, or somebody looks.
        new = [slot for slot in ordered if slot.index not in known]
        of_new = gradient_norms([ordered[slot] for slot in new])
        norms = {slot.index: norm for slot, norm in zip(new, of_new, strict=True)}
        while not self.arrivals.fits([*ordered.values()]):  # before there is a copy of them on the device
            # Larger than the ring: block by block, and waited for.
            if not self.arrivals.coming:
                self._add(grads, ordered, norms)
                return
            self._add_arrival()
        self.arrivals.start_unit(grads, ordered, norms)

    def _wait_for_arrivals(self, grads: UnitGrads | None = None) -> None:
        """Return when all that is on its way for a unit has been added; None: for any."""
        while any(grads is None or each.purpose.grads is grads for each in self.arrivals.coming):
            self._add_arrival()

    def _add_arrival(self) -> None:
        with self._clock.waiting("gradients"):
            self.arrivals.await_first()
        self._add_first()

    def _add_first(self) -> None:
        delivery, gradients = self.arrivals.pop_gradients()
        self._add(delivery.grads, gradients, delivery.norms)

    def send_ahead(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Start to bring gradients from a GPU that `add_for_update` would add to those in RAM; returns what is left for it."""
        grads = self._grads[unit.index]
        if (
            self._device.uses_host_memory
            or not grads.stays_in_ram
            or not (grads.present or self.arrivals.slots_of(grads))
        ):
            return gradients
        self.add(unit, gradients)
        return {}

    def have_arrived(self, unit: Unit) -> bool:
        """Whether none of the unit's is on its way. Waits for nothing."""
        grads = self._grads[unit.index]
        while self.arrivals.slots_of(grads):
            if not self.arrivals.is_first_done():
                return False
            self._add_first()
        return True

    def _add(
        self,
        grads: UnitGrads,
        gradients: Mapping[Slot, torch.Tensor],
        norms: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Add gradients that nothing on its way comes before; ``norms`` are those of some of them."""
        added = {slot.index for slot in gradients}
        grads.zeros -= added
        if grads.stays_in_ram:
            buffer = self._memory_of(grads)
            if self.main_dtype.after(buffer.dtype, gradients, grads.present) == buffer.dtype or self._widen(grads):
                buffer = self._memory_of(grads)
                buffer.add(gradients, grads.present, self.arrivals)
                grads.update_norms(norms, gradients, buffer.dtype)
        if not grads.stays_in_ram and grads.buffer is not None:
            grads.on_change()
            grads.buffer.add(gradients, grads.present, self.arrivals)
        elif not grads.stays_in_ram:
            buffer = self._sum(grads, gradients)
            grads.update_norms(norms, gradients, buffer.dtype)
            self._write(grads, buffer, gradients)
        grads.present |= added

    def _widen(self, grads: UnitGrads) -> bool:
        """Keep them in RAM as fp32, unless sums are to be rounded; whether they do not have to be spilled."""
        # A single bf16 gradient loses nothing as bf16, and the plan counts on that where a step has one micro-batch. A
        # second one, or a look at `p.grad`, needs fp32: memory of twice the size if the pool has it, otherwise NVMe.
        if not grads.stays_in_ram:
            return False
        narrow = self._memory_of(grads)
        if narrow.dtype == torch.float32 or self.main_dtype.rounds:
            return True
        num_bytes = grads.unit.layout.trainable_numel * FP32_BYTES
        if self._committed_bytes() + num_bytes <= self.pool.capacity_bytes:
            wide = GradientBuffer(grads.unit, self._allocate(num_bytes))
            wide.values.copy_(narrow.values)
            grads.buffer = wide
            self.pool.release(narrow.flat)
            return True
        grads.norms.clear()
        self._write(grads, narrow, grads.slots())
        grads.stays_in_ram, grads.buffer = False, None
        return False

    def _committed_bytes(self) -> int:
        """Memory that the plan counts on: of all units that stay in RAM, and scratch for one that does not."""
        kept = sum(
            grads.unit.layout.trainable_numel * self._kept_dtype.itemsize
            if grads.buffer is None
            else grads.buffer.flat.num_bytes
            for grads in self._grads
            if grads.stays_in_ram
        )
        return kept + self._scratch_bytes

    def add_for_update(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        """Add ``gradients``, and give all of the unit's to an update that runs next; ``norms`` gets their 2-norms."""
        grads = self._after_arrivals(unit)
        self._write_zeros(grads, gradients)
        self._detach_users_views(grads)
        if grads.stays_in_ram and grads.buffer is not None:
            self.add(unit, gradients)
            gradients = {}
            self._wait_for_arrivals(grads)
        if not grads.present and not self._device.uses_host_memory:
            return self._leave_on_device(unit, gradients, norms)
        # Detached: the update frees it for the next unit. Kept for this one, it would be idle until the next step.
        if gradients:
            self._wait_for_arrivals()  # those come block by block
        buffer = self._sum(grads, gradients)
        slots = [slot for slot in unit.layout.slots if slot in gradients or slot.index in grads.present]
        grads.drop(set(grads.present))
        norms.update({(unit.index, index): norm for index, norm in buffer.norms(slots).items()})
        return self._as_source(buffer, slots)

    def _as_source(self, buffer: GradientBuffer, slots: Sequence[Slot]) -> GradientSource:
        source = MemoryGradients(buffer, slots)
        flat = self._detach(buffer)
        if flat is not None:
            self._add_memory_use(source, flat)
        return source

    def _detach(self, buffer: GradientBuffer) -> FlatBuffer | None:
        """The memory of a buffer that is not needed any more; None if tensors of the user's keep it."""
        if not buffer.is_referenced:
            return buffer.flat
        self.pool.disown(buffer.flat)
        return None

    def _release(self, buffer: GradientBuffer) -> None:
        flat = self._detach(buffer)
        if flat is not None:
            self.pool.release(flat)

    def _leave_on_device(
        self, unit: Unit, gradients: Mapping[Slot, torch.Tensor], norms: dict[tuple[int, int], torch.Tensor]
    ) -> GradientSource:
        # Autograd's own tensors, which the update fetches chunk by chunk: no memory of the host is taken.
        ordered = {slot: in_slot_order(gradient, slot) for slot, gradient in gradients.items()}
        for slot, norm in zip(ordered, gradient_norms([*ordered.values()]), strict=True):
            norms[unit.index, slot.index] = norm
        while sum(flat is None for _, flat in self._memory_uses) >= _MOST_UNITS_ON_DEVICE:
            self._await_memory_use()
        source = DeviceGradients(ordered, self._device, self._device.mark())
        self._add_memory_use(source, None)
        return source

    def open_sum(self, unit: Unit) -> None:
        """Sum what is added to a unit in memory until `close_sum` or `add_for_update`, or until room gets scarce."""
        grads = self._grads[unit.index]
        if not grads.stays_in_ram and grads.buffer is None:
            self._keep_for_now(grads)

    def close_sum(self, unit: Unit, span: tuple[int, int] | None = None) -> None:
        """Spill what `open_sum` kept in memory; of it ``span`` alone, elements of the trainable segment, and no norms."""
        grads = self._grads[unit.index]
        if grads.stays_in_ram or grads.buffer is None:
            return
        is_unchanged, buffer = grads.is_unchanged, grads.detach_buffer()
        # A look changed nothing, so the extent still has the same values.
        if is_unchanged:
            self._release(buffer)
        else:
            grads.norms.clear()
            self._write(grads, buffer, grads.slots() if span is None else (), span)

    def _write_zeros(self, grads: UnitGrads, besides: Container[Slot] = ()) -> None:
        """Gradients that are zero become gradients like any other, but for those in ``besides``, to which some are added."""
        zeros, grads.zeros = grads.zeros, set()
        if zeros:
            slots = [slot for slot in grads.unit.layout.slots if slot.index in zeros and slot not in besides]
            self.open_sum(grads.unit)
            for slot in slots:
                # One element, expanded: no memory for a gradient of zeros.
                zero = torch.zeros((), dtype=self.main_dtype.dtype, device=self.pool.torch_device)
                self._add(grads, {slot: zero.expand(slot.spec.shape)})

    def _detach_users_views(self, grads: UnitGrads) -> None:
        # What a script got from `p.grad` keeps its values, and shows the store no more.
        if grads.present:
            self.held.detach(grads.unit, grads.slots())

    def _sum(
        self, grads: UnitGrads, gradients: Mapping[Slot, torch.Tensor], *, is_wide: bool = False
    ) -> GradientBuffer:
        """The unit's gradients plus ``gradients``, in memory that the caller owns."""
        if grads.buffer is not None:
            known = grads.detach_buffer()
            known.add(gradients, grads.present, self.arrivals)
            return known
        stored = (grads.spilled_dtype if grads.present else None) or self.main_dtype.dtype
        dtype = torch.float32 if is_wide else self.main_dtype.after(stored, gradients, grads.present)
        buffer = GradientBuffer(grads.unit, self._allocate(grads.unit.layout.trainable_numel * dtype.itemsize), dtype)
        try:
            if grads.present:
                swapper, extent = self._spill(grads)
                with self._clock.waiting("read"):
                    if grads.spilled_span is None:
                        buffer.fill(lambda target: swapper.read(extent, target), stored)
                    elif grads.spilled_span[0] < grads.spilled_span[1]:  # of the mean, this rank's shard alone
                        start, stop = grads.spilled_span
                        swapper.read(extent, buffer.values[start:stop], offset=start * stored.itemsize).wait()
                self.resumed_bytes += buffer.flat.num_bytes
            buffer.add(gradients, grads.present, self.arrivals)
        except BaseException:
            self.pool.release(buffer.flat)
            raise
        return buffer

    def _memory_of(self, grads: UnitGrads) -> GradientBuffer:
        buffer = grads.buffer
        if buffer is None:
            flat = self._allocate(grads.unit.layout.trainable_numel * self._kept_dtype.itemsize)
            buffer = grads.buffer = GradientBuffer(grads.unit, flat, self._kept_dtype)
        return buffer

    def _keep_for_now(self, grads: UnitGrads, *, is_unchanged: bool = False) -> None:
        """Have gradients that do not stay in memory until room gets scarce; ``is_unchanged``: spilled as well."""
        # Wide, as several gradients will be added.
        grads.buffer = self._sum(grads, {}, is_wide=not self.main_dtype.rounds)
        grads.is_unchanged, grads.number = is_unchanged, next(self._numbers)

    def _write(
        self, grads: UnitGrads, buffer: GradientBuffer, changed: Iterable[Slot], span: tuple[int, int] | None = None
    ) -> None:
        """Spill ``buffer``, or elements ``span`` of it; the gradients in ``changed`` are not those that were spilled before."""
        swapper, extent = self._spill(grads)
        # Norms are taken while the values are in memory: the step would have to read them for that.
        grads.norms |= buffer.norms([slot for slot in changed if slot.index not in grads.norms])
        grads.spilled_dtype, grads.spilled_span = buffer.dtype, span
        start, stop = (0, buffer.values.numel()) if span is None else span
        if start == stop:
            self._release(buffer)
            return
        handle = swapper.write(extent, buffer.values[start:stop], offset=start * buffer.dtype.itemsize)
        if buffer.is_referenced:
            handle.wait()  # afterwards it is the user's, who may write to it
            # Not returned to the pool: the user's tensor keeps the memory.
            self._detach(buffer)
        else:
            self._add_memory_use(SpillingWrite(handle, buffer.dtype), buffer.flat)

    def _allocate(self, num_bytes: int) -> FlatBuffer:
        """Memory of the pool; waits for room."""
        # First uses of memory have to end. Without any, a unit that is only kept for now is spilled, the oldest first;
        # then an exchange is waited for. If users hold tensors over all of it, the budget is exceeded.
        self._retire()
        while True:
            flat = self.pool.allocate(num_bytes)
            if flat is not None:
                return flat
            if self._memory_uses:
                self._await_memory_use()
                continue
            # No variable holds a buffer: it would keep memory from being unmapped that the pool gives up below.
            taken = [
                grads
                for grads in self._grads
                if grads.buffer is not None and not grads.stays_in_ram and not self._is_in_exchange(grads)
            ]
            closable = [grads for grads in taken if grads.buffer is not None and not grads.buffer.is_referenced]
            if closable:
                self.close_sum(min(closable, key=lambda grads: grads.number).unit)
            elif self._await_exchange():
                continue
            elif taken:
                return self.pool.allocate_beyond(num_bytes)
            # Frees memory that requests of the swapper had, or waits for those.
            elif not self.pool.reclaim() and not self.pool.awaits_requests():
                raise RuntimeError(f"the plan's memory for gradients has no room for {num_bytes} bytes")

    def _is_in_exchange(self, grads: UnitGrads) -> bool:
        """Whether the thread that averages over ranks uses the unit's memory. One rank has none: `ReducedGradients`."""
        return False

    def _await_exchange(self) -> bool:
        """Return when another thread has released some unit's memory; whether one had any."""
        return False

    def _retire(self, *, in_parts: bool = False) -> bool:
        """Take back what is free again, ``in_parts``: of what is still in use, too; return whether anything was."""
        num_uses = len(self._memory_uses)
        made_room = False
        for _ in range(num_uses):
            use, flat = self._memory_uses.popleft()
            if not use.is_released():
                self._memory_uses.append((use, flat))
                if in_parts and flat is not None:
                    made_room |= self.pool.release_front(flat, use.used_bytes)
            elif flat is not None:
                self.pool.release(flat)
        return made_room or len(self._memory_uses) < num_uses

    def _add_memory_use(self, use: GradientSource, flat: FlatBuffer | None) -> None:
        use.add_release_callback(self._ended.ring)
        self._memory_uses.append((use, flat))

    def _await_memory_use(self) -> None:
        """Return when a use of memory has ended, whichever ends first, or a part of one, and that memory is back."""
        with self._clock.waiting("gradients"):
            while True:
                if self._retire(in_parts=True) or not self._memory_uses:
                    return
                self._ended.wait(POLL_SECONDS)  # so that a KeyboardInterrupt gets through

    def norms_of(self, unit: Unit) -> dict[int, torch.Tensor]:
        """Slot index -> 2-norm of the parameter's whole main gradient (0-dim fp32), of all that have one."""
        grads = self._after_arrivals(unit)
        self._write_zeros(grads)
        if not grads.stays_in_ram:
            self.close_sum(unit)
            return {index: grads.norms[index] for index in grads.present}
        buffer = self._memory_of(grads)
        # Users may have written to memory that they hold: its norms are taken anew.
        known = {} if buffer.is_referenced else grads.norms
        return known | buffer.norms([slot for slot in grads.slots() if slot.index not in known])

    def source(self, unit: Unit, *, keeps: bool = False) -> GradientSource:
        """The unit's main gradients for an update, which must be the next to use them; gone then, unless ``keeps``."""
        grads = self._after_arrivals(unit)
        self._write_zeros(grads)
        if not keeps:
            self._detach_users_views(grads)
        self.close_sum(unit)  # the update reads either RAM or the extent
        slots, dtype = grads.slots(), grads.spilled_dtype or self.main_dtype.dtype
        if not keeps:
            grads.drop(set(grads.present))
        if not grads.stays_in_ram:
            return SpilledGradients(*self._spill(grads), slots, dtype, is_kept=keeps)
        buffer = self._memory_of(grads)
        # The user keeps the memory; the update reads it, and releases nothing.
        if buffer.is_referenced and not keeps:
            self.pool.disown(grads.detach_buffer().flat)
        return MemoryGradients(buffer, slots, is_kept=keeps)

    # ------------------------------------------------------- looked at, replaced, zeroed: no update may be pending

    @property
    def dtype_shown(self) -> torch.dtype:
        """The dtype of gradients that users see."""
        return self.main_dtype.dtype if self.main_dtype.rounds else torch.float32

    def is_available(self, unit: Unit) -> bool:
        """Whether `show` has nothing to do."""
        grads = self._grads[unit.index]
        return (
            grads.stays_in_ram
            and not self.arrivals.slots_of(grads)
            and grads.buffer is not None
            and grads.buffer.dtype == self.dtype_shown
            and not grads.zeros
            and (self.scaler.scale == 1.0 or grads.is_unscaled)
        )

    def show(self, unit: Unit) -> GradientBuffer:
        """The gradients in memory, unscaled, until the next call for any unit. Call `on_change` after writing to them."""
        grads, buffer = self._after_arrivals(unit), self.open(unit)
        if not grads.is_unscaled and self.scaler.scale != 1.0:
            for slot in grads.slots():
                buffer.view(slot).mul_(1.0 / self.scaler.scale)  # as torch.amp.GradScaler does
            grads.is_unscaled = True
            grads.on_change()
        return buffer

    def open(self, unit: Unit) -> GradientBuffer:
        """As `show`, but without dividing by the loss scale."""
        grads = self._after_arrivals(unit)
        self._write_zeros(grads)
        if not self._widen(grads) and grads.buffer is None:
            self._keep_for_now(grads, is_unchanged=True)
        if grads.stays_in_ram:
            grads.norms.clear()  # whoever looks may write
        return self._memory_of(grads)

    def on_change(self, unit: Unit) -> None:
        """The gradients that `show` returned have been changed, or will be."""
        self._after_arrivals(unit).on_change()

    def scale_of(self, unit: Unit) -> float:
        """The factor that the unit's gradients have."""
        return 1.0 if self._after_arrivals(unit).is_unscaled else self.scaler.scale

    def zero(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Gradients that are there become zero, but for those ``kept``: torch's ``zero_grad(set_to_none=False)``."""
        self._wait_for_arrivals()  # what is on its way counts as present
        found = [grads.present | grads.zeros for grads in self._grads]
        self.clear(kept)
        for grads, slots in zip(self._grads, found, strict=True):
            grads.zeros |= slots - grads.present

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Replace one parameter's main gradient by ``gradient``, which has no loss scale; None drops it."""
        grads = self._after_arrivals(unit)
        if slot.index in grads.present:
            self.held.detach(unit, [slot])
        if not grads.stays_in_ram or self.scaler.scale != 1.0:
            self.show(unit)
            grads.on_change()
        grads.present.discard(slot.index)
        grads.zeros.discard(slot.index)
        if gradient is not None:
            self._wait_for_arrivals()  # a user's tensor on a GPU comes block by block, through an empty ring
            self._add(grads, {slot: gradient})

    def clear(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Forget all main gradients but for those ``kept``, by (unit index, slot index); the memory stays reserved."""
        if kept:
            self._wait_for_arrivals()  # `forget` would drop downloads of gradients that are kept
        self.arrivals.forget()
        for grads in self._grads:
            gone = {index for index in grads.present | grads.zeros if (grads.unit.index, index) not in kept}
            ended = [slot for slot in grads.slots() if slot.index in gone]
            if ended:
                self.held.detach(grads.unit, ended)
            grads.drop(gone)
            buffer = grads.buffer
            is_left = grads.present or grads.zeros or self._is_in_exchange(grads)
            # Memory of units that stay in RAM is kept for the next step, unless the user holds it.
            if buffer is not None and not is_left and (not grads.stays_in_ram or buffer.is_referenced):
                self._release(grads.detach_buffer())

    def close(self) -> None:
        """Give the memory back."""
        self.arrivals.forget()
        for _, flat in self._memory_uses:
            if flat is not None:
                self.pool.release(flat)
        self._memory_uses.clear()
        self.release_memory()

    def release_memory(self) -> None:
        """Give the memory back in which gradients of the next step would be kept. There are none, and no update runs."""
        self._retire()
        for grads in self._grads:
            if grads.buffer is not None:
                self._release(grads.detach_buffer())
