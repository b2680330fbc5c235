"""One vertical step: unit by unit, each with all micro-batches.

[Note: moments] The parts of a step are numbered, so that "no gradient of this unit can come any more" is one
comparison. With blocks 1 and 2, the moments of forward are:

    0  embedding     1  block 1     2  between them     3  block 2     4  norm, head, loss

Backward goes through the same moments from 4 to 0. A unit's entry in `first_moments` is the moment at which forward
touched it first. Its gradients are complete when backward has ended that moment. The head alone has 4, so its sum is
complete after 4. If the embedding is also the head, its entry is 0, and its sum is complete at the very end.

[Note: parts] An embedding that is also the head gets a gradient h from its use in the head, and e from the embedding.
One micro-batch after the other, the sum is (h0 + e0) + (h1 + e1): in the weight's dtype inside the brackets, in fp32
outside. In the vertical order h0 and h1 come before e0 and e1. So each h waits as an activation checkpoint, on the
drive if need be, and is added to its e when that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import Any

import torch

from infinity.activations.activation_checkpoints import ActivationCheckpoint, ActivationCheckpoints
from infinity.activations.spilled import SpillSpace
from infinity.activations.unsupported import NeverSupportedSchedule, UnsupportedSchedule
from infinity.device.compute import ComputeDevice
from infinity.errors import StepError
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.loop.phase import Phase, PhaseGuard
from infinity.loop.vertical_forward import VerticalForward, present
from infinity.numerics.random_states import are_unchanged, random_states
from infinity.units.layout import Slot, in_slot_order
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper
from infinity.vertical.call import Block
from infinity.vertical.microbatch import BlockArrival, MicroBatch, MicroBatchThread
from infinity.vertical.restoring import StepStart
from infinity.vertical.schedule_selector import ScheduleSelector


@dataclass(frozen=True)
class StepContext:
    """The parts of an engine that vertical steps work with."""

    module_hooks: ModuleHooks
    coordinator: ParameterCoordinator
    stepper: Stepper
    guard: PhaseGuard
    device: ComputeDevice
    space: SpillSpace
    activation_bytes: int | None
    """Host memory for activation checkpoints; None: they are not spilled."""
    blocks: tuple[str, ...]
    """FQNs of the modules that are units of their own."""
    selector: ScheduleSelector


@dataclass(frozen=True)
class StepOptions:
    """Options of one step."""

    step: int
    """The number of the step."""
    divisor: int
    """By which each loss is divided."""
    updates: bool = True
    """Whether a unit may be updated before all gradients of the step have come."""
    keeps_bits: bool = False
    """Whether results must have the bits of one micro-batch after the other. What changes them stops vertical steps, or
    is a warning if the config asks for vertical steps."""


@dataclass(eq=False)
class UnitSums:
    """Sums gradients in fp32, in the order in which they come, and delivers each unit's sum when it is complete."""

    # On the CPU they are added into the main gradients' own memory. On a GPU they are summed there, so that one
    # gradient per step goes to the host, and not one per micro-batch.
    _stepper: Stepper
    _device: ComputeDevice
    _updates_now: bool
    """Whether to update a unit as soon as its sum is complete."""
    _step: int
    """The number of the present step, for messages."""
    _open: dict[int, Unit] = field(default_factory=dict)
    """By index, units that got gradients in the present moment."""
    _on_device: dict[int, dict[Slot, torch.Tensor]] = field(default_factory=dict)
    """Unit index -> its sums in the present moment, on a GPU: fp32, in the parameter's shape and strides."""
    _complete: set[int] = field(default_factory=set)
    """Indices of units that must get no more gradients."""

    def add(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        """Add gradients of one micro-batch.

        Raises:
            StepError: the unit's sum was complete. Its update may have begun, so the gradient would be lost.
        """
        if not gradients:
            return
        if unit.index in self._complete:
            raise StepError.late_gradient(next(iter(gradients)).spec.fqn, unit=unit.name, step=self._step)
        if not self._device.uses_host_memory:
            sums = self._on_device.setdefault(unit.index, {})
            for slot, gradient in gradients.items():
                ordered = in_slot_order(gradient, slot)
                if slot in sums:
                    sums[slot].add_(ordered)
                else:
                    sums[slot] = ordered.to(torch.float32, copy=True)  # a copy: autograd may own the gradient
        else:
            if unit.index not in self._open:
                self._stepper.gradients.open_sum(unit)
            self._stepper.deliver(unit, gradients, updates_now=False)
        self._open[unit.index] = unit

    def end_moment(self, complete: Mapping[int, Unit]) -> None:
        """End a part of backward that all micro-batches have been through. ``complete``: units with all gradients."""
        for unit in self._open.values():
            self._close(unit, is_complete=unit.index in complete)
        for unit in complete.values():  # its last gradients may have come at an earlier moment
            if unit.index not in self._open and self._stepper.gradients.slots_with_gradient(unit):
                self._close(unit, is_complete=True)
        self._open.clear()
        self._complete.update(complete)

    def _close(self, unit: Unit, *, is_complete: bool) -> None:
        gradients = self._on_device.pop(unit.index, {})
        if is_complete and self._updates_now:
            self._stepper.deliver(unit, gradients, updates_now=True)
            self._stepper.gradients.offer(unit)
            return
        if gradients:
            self._stepper.deliver(unit, gradients, updates_now=False)
        if is_complete and not self._stepper.gradients.offer(unit):
            self._stepper.gradients.close_sum(unit)
        # Otherwise more gradients will come. The sum stays in memory unless the room is needed; then it is spilled.


Key = tuple[int, int]
"""A parameter: index of its unit, and of its slot there."""


class TiedParts:
    """Gradients of one step that wait for their second part: see [Note: parts]."""

    def __init__(self, checkpoints: ActivationCheckpoints, tied: Collection[Key]) -> None:
        """``tied``: parameters that two modules have."""
        self._checkpoints = checkpoints
        self.tied = frozenset(tied)
        self._waiting: dict[tuple[int, Key], ActivationCheckpoint] = {}

    def join(self, batch: int, key: Key, gradient: torch.Tensor | None, *, is_last: bool) -> torch.Tensor | None:
        """Add a part of a gradient.

        Args:
            batch: the number of the micro-batch.
            key: the parameter.
            gradient: the part, which this object owns from now on. None: no further part has come.
            is_last: whether this is the last moment at which a part may come.

        Returns:
            The whole gradient at the last moment, else None.
        """
        kept = self._waiting.pop((batch, key), None)
        if kept is not None:
            before = self._checkpoints.load(kept)
            gradient = before if gradient is None else before + gradient
            self._checkpoints.release(kept)
        if is_last or gradient is None:
            return gradient
        self._waiting[batch, key] = self._checkpoints.keep(gradient)
        return None

    def waiting_of(self, batch: int) -> list[Key]:
        """The parameters with a waiting part of this micro-batch."""
        return [key for number, key in self._waiting if number == batch]

    @property
    def kept(self) -> Iterator[ActivationCheckpoint]:
        """The waiting parts, in the order in which they came."""
        return iter(list(self._waiting.values()))


@dataclass(eq=False)
class VerticalStep:
    """One vertical step. All methods but `on_call` run on the training thread."""

    _on: StepContext
    unit_indices: InitVar[Container[int]]
    """Indices of the units that are blocks."""
    _options: StepOptions
    tied: InitVar[Collection[Key]]
    """Parameters whose gradients come in two parts: see [Note: parts]."""
    is_trial: bool
    """Check everything, and update nothing before the end, so that the step can be repeated in the ordinary order."""
    _batches: list[MicroBatch] = field(default_factory=list)
    _blocks: list[Block] = field(default_factory=list)
    """In the order of calls; a block that is called twice is in it twice. Position p is `_blocks[p - 1]`."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _hooked: set[tuple[int, int, int]] = field(default_factory=set)
    """(micro-batch, unit, slot) of gradients that have been through a hook of the user."""
    _others: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    """Parameters that no engine holds, with copies of the gradients they had: backward adds to those in place."""
    _runs_segment_backward = False
    _is_final = False
    """Whether weights may have been updated, so that the step cannot be repeated."""
    _place = 0
    """Counts the parts of forward that all micro-batches run one after the other: a block, or what lies between
    two."""
    _drew_at: int | None = None
    """The `_place` at which random numbers were drawn."""
    _gradient_at: dict[Key, int] = field(default_factory=dict)
    """Parameter -> the moment at which its gradient came."""

    def __post_init__(self, unit_indices: Container[int], tied: Collection[Key]) -> None:
        coordinator, self._guard = self._on.coordinator, self._on.guard
        self._backwards = coordinator.backwards
        self.checkpoints = ActivationCheckpoints(
            self._on.space, coordinator.clock, coordinator.pack, coordinator.unpack, self._on.activation_bytes
        )
        self._tied = TiedParts(self.checkpoints, tied)
        self._updates_in_backward = self._on.stepper.updates_in_backward and self._options.updates
        self._updates_now = self._updates_in_backward and not self.is_trial
        self._vertical_forward = VerticalForward(coordinator.parameter_cache, unit_indices)
        self._sums = UnitSums(self._on.stepper, self._on.device, self._updates_now, self._options.step)
        self._units = coordinator.parameter_map.units

    # -------------------------------------------------------------------------------------------------------- the step

    def run(
        self,
        compute_losses: Sequence[Callable[[], torch.Tensor]],
        threads: Sequence[MicroBatchThread],
        start: StepStart,
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches, each on one of ``threads``; returns their losses, detached."""
        on, coordinator = self._on, self._on.coordinator
        found = ((other, other.grad) for other in on.stepper.step_groups.not_held())
        self._others = [(other, None if gradient is None else gradient.clone()) for other, gradient in found]
        # From here until `end_vertical`, a module of a block that is called fetches nothing: `_forward` fetches its
        # unit.
        coordinator.begin_vertical(self._vertical_forward)
        self._backwards.collector.begin_collecting()
        for index, (compute_loss, thread) in enumerate(zip(compute_losses, threads, strict=True)):
            # A trial is the first step: it looks whether recomputed blocks have the same bits.
            self._batches.append(
                MicroBatch(
                    index, compute_loss, thread, self.checkpoints, coordinator, on.device, is_trial=self.is_trial
                )
            )
        self._forward()
        self._vertical_forward.begin_moment(None)
        coordinator.end_forward()
        self._check(start)
        self._backward()
        self._end_backward()
        return self._losses

    def _forward(self) -> None:
        coordinator = self._on.coordinator
        # All micro-batches wait before the same block now. Its unit is fetched once, and each of them computes it.
        while (block := self._advance()) is not None:
            self._blocks.append(block)
            self._place += 1
            self._vertical_forward.begin_moment(2 * len(self._blocks) - 1)
            coordinator.enter(block.unit)
            try:
                for batch in self._batches:
                    self._resume(batch)
                    # Normally it pauses behind the block, with no arrival. Otherwise the block has raised an error that
                    # the model has caught.
                    if batch.arrival is not None or batch.is_over:
                        raise UnsupportedSchedule(f"{block.name} raises an error that the model catches")
            finally:
                coordinator.leave(block.unit)
            self._vertical_forward.begin_moment(2 * len(self._blocks))

    def _advance(self) -> Block | None:
        """Let all micro-batches run to their next block, and return that; None at the end of forward.

        Raises:
            UnsupportedSchedule: they arrive at different blocks, or not all at the end.
        """
        first: BlockArrival | None = None
        self._place += 1
        for batch in self._batches:
            self._resume(batch)
            if batch.arrival is None:
                self._end_forward(batch)
            if batch is not self._batches[0] and batch.arrival != first:
                raise UnsupportedSchedule(
                    f"micro-batches call different blocks: {_name(first)}, {_name(batch.arrival)}"
                )
            first = batch.arrival
        if first is None:
            return None
        if self._blocks and first.block is self._blocks[0] and self._options.keeps_bits:
            # Refused even if the config asks for vertical steps. DPO, say, switches adapters off for a second call, and
            # what one micro-batch sets holds for all others, which are at another place of the model.
            raise NeverSupportedSchedule(
                "a micro-batch calls the model several times, and values that it sets in between would apply to all "
                "micro-batches"
            )
        return first.block

    def _resume(self, batch: MicroBatch) -> None:
        # In the ordinary order, micro-batch 0 draws at places A and B, then micro-batch 1 does. Here both draw at A
        # before either draws at B. With one place only, the order of draws is the same.
        random = random_states() if self._options.keeps_bits else None
        batch.resume()
        if random is not None and not are_unchanged(random):
            if self._drew_at not in (None, self._place):
                self._differs(
                    "random numbers are drawn at several places of the model, so micro-batches get other ones"
                )
            self._drew_at = self._place
        self._on.coordinator.pause()

    def _differs(self, what: str) -> None:
        """Refuse the step, or only warn, since ``what`` makes bits differ from those of the ordinary order."""
        if self._options.keeps_bits and not self._on.selector.on_difference(what):
            raise NeverSupportedSchedule(what)

    def _end_forward(self, batch: MicroBatch) -> None:
        """Start the backward of a micro-batch that has its loss: the part from the loss to the last block."""
        # At once, and not when all have their losses: logits are often the largest activations, and so only those of
        # one micro-batch are in memory.
        on = self._on
        loss = batch.end_forward()
        self._guard.check_backward(loss)
        self._losses.append(loss.detach())
        with torch.enable_grad():  # the step itself runs in whatever mode the caller has
            scaled = on.stepper.scaler.scale_loss(loss, self._options.divisor)
        if not scaled.requires_grad:
            raise UnsupportedSchedule("the loss does not depend on the parameters")
        batch.graph.seal(scaled)
        for unit, slot in self._tied.tied:
            if id(self._units[unit].parameters[slot]) in batch.graph.repeated:
                self._report_several_uses(unit, slot)
        del scaled, loss  # only the graph holds them now, and frees them as it runs
        if self._guard.phase is Phase.READY:
            self._guard.move_to(Phase.BACKWARD)
        with self._vertical_forward.in_between(), self._on.coordinator.as_if_inside(False):
            self._run_segment(batch, len(batch.calls) + 1)

    def _check(self, start: StepStart) -> None:
        """Check what forward has changed. Nothing is updated yet, so the step can still be repeated.

        Raises:
            UnsupportedSchedule: an activation checkpoint or a buffer was written to in a way that backward cannot
                repeat.
        """
        self.checkpoints.check_unchanged()
        writing = [block for block in self._blocks if block.buffers.are_written]
        for block in writing:
            if writing.count(block) > 1:
                raise UnsupportedSchedule(f"{block.name} writes to its buffers and is called several times")
        changed = start.changed_buffer({module for block in writing for module in block.buffers.modules})
        if changed is not None:
            raise UnsupportedSchedule(f"the model's forward changes the buffer {changed} between its blocks")

    def _backward(self) -> None:
        # For each position from the last: backward of the block for all micro-batches, then the graph segment before it
        # for all of them. Checkpoints are loaded in the same order, so they are prefetched from the drive.
        positions = range(len(self._blocks), 0, -1)
        calls = (batch.calls[position - 1] for position in positions for batch in self._batches)
        inputs = (kept for call in calls if call is not None for kept in call.kept)
        self.checkpoints.begin_backward(chain(inputs, self._tied.kept))
        self._is_final = self._updates_now  # before `begin_last`, which allows the first update
        if self._options.updates and not self.is_trial:
            self._on.stepper.begin_last(self._options.step, updates_now=self._updates_now)
        self._end_moment(2 * len(self._blocks))  # the losses' segments have run in `_end_forward`
        for position in positions:
            self._backward_of_unit(position, self._blocks[position - 1].unit)
            self._end_moment(2 * position - 1)  # the block's moment; 2 * position - 2 is that of the segment before it
            for batch in self._batches:
                self._run_segment(batch, position)
            self._end_moment(2 * position - 2)

    def _backward_of_unit(self, position: int, unit: Unit) -> None:
        calls = [(batch, call) for batch in self._batches if (call := batch.calls[position - 1]) is not None]
        for batch, call in calls:
            batch.graph.deliver(call)
        # A block whose results the losses do not use is not fetched.
        if not any(call.has_gradient for _, call in calls):
            for _, call in calls:
                if not call.is_over:  # one without results that need a gradient was dropped in forward
                    call.drop()
            return
        self._on.coordinator.enter(unit)
        try:
            for batch, call in calls:
                if call.is_over:
                    continue
                if not call.has_gradient:
                    call.drop()
                    continue
                for edge, gradient in call.backward(self._recomputing, batch.graph.pop):
                    if batch.graph.add(edge, gradient):
                        self._differs(
                            "a block gets one value as several tensors, and the parts of its gradient are added up in "
                            "another order"
                        )
                self._gather(batch, 2 * position - 1)
        finally:
            self._on.coordinator.leave(unit)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """The context of a block's second computation, which is not inside an autograd backward as in checkpointing."""
        with self._on.coordinator.as_if_inside(True), torch.enable_grad(), self._on.coordinator.saving:
            yield

    def _run_segment(self, batch: MicroBatch, position: int) -> None:
        self._runs_segment_backward = True  # a block that is called now is recomputed by the model's own checkpointing
        try:
            batch.graph.run(position)
        finally:
            self._runs_segment_backward = False
        self._gather(batch, 2 * position - 2)

    def _gather(self, batch: MicroBatch, moment: int) -> None:
        # Take the gradients that autograd has just accumulated. At once, so that those of the next micro-batch are not
        # added to them in the weights' dtype.
        for unit, gradients in self._backwards.collector.pop_gradients():
            for slot in gradients:
                key = unit.index, slot.index
                # The parameter is used in two parts of the model, so the sum over micro-batches has another order than
                # in the ordinary one.
                if key not in self._tied.tied and self._gradient_at.setdefault(key, moment) != moment:
                    self._report_several_uses(*key)
                if unit.parameters[slot.index]._backward_hooks:
                    # A second part for this micro-batch: the hook would have to see the sum of both.
                    if (batch.index, unit.index, slot.index) in self._hooked:
                        raise UnsupportedSchedule(
                            f"'{slot.spec.fqn}' is used in several blocks and has a hook for its gradient"
                        )
                    self._hooked.add((batch.index, unit.index, slot.index))
            self._sums.add(unit, self._joined(batch, unit, gradients, moment))
        for index, _ in self._tied.waiting_of(batch.index):
            unit = self._units[index]
            # Backward does not reach this unit again, so no second part can come: the waiting part is the gradient.
            if self._vertical_forward.first_moments.get(index) == moment:
                self._sums.add(unit, self._joined(batch, unit, {}, moment))
        self._on.coordinator.pause()

    def _joined(
        self, batch: MicroBatch, unit: Unit, gradients: dict[Slot, torch.Tensor], moment: int
    ) -> dict[Slot, torch.Tensor]:
        """Join ``gradients`` with waiting parts, and take those out that still lack one: see [Note: parts]."""
        is_last = self._vertical_forward.first_moments.get(unit.index) == moment
        for index, number in self._tied.tied:
            slot = unit.layout.slots[number] if index == unit.index else None
            if slot is not None and (slot in gradients or is_last):
                whole = self._tied.join(batch.index, (index, number), gradients.pop(slot, None), is_last=is_last)
                if whole is not None:
                    gradients[slot] = whole
        return gradients

    def _report_several_uses(self, unit: int, slot: int) -> None:
        fqn = self._units[unit].layout.slots[slot].spec.fqn
        self._differs(f"'{fqn}' is used at several places, and the parts of its gradient are added up in another order")

    def _end_moment(self, moment: int) -> None:
        """End a moment of backward: see [Note: moments]."""
        # Units that forward touched first at this moment are complete: they may be updated now.
        firsts = self._vertical_forward.first_moments
        self._sums.end_moment({index: self._units[index] for index, first in firsts.items() if first == moment})
        self._on.coordinator.parameter_cache.due.clear()

    def _end_backward(self) -> None:
        """End the backward of all micro-batches in the collector, the stepper and the coordinator."""
        on = self._on
        updates = self._updates_in_backward
        self._backwards.collector.end_collecting()
        on.stepper.finish_backward(updates_now=updates)
        self._guard.move_to(Phase.READY)
        on.coordinator.end_vertical()
        # Before a step that changes all weights, nothing is worth fetching.
        self._backwards.end(is_complete=True, fetches=updates and on.stepper.updates_all_in_backward)
        self._clear()

    # -------------------------------------------------------------------------------------------------------- around it

    def on_call(self, block: Block, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Handle a call of a block or of a module in one, on whatever thread it comes."""
        batch = present.micro_batch
        if batch is not None and not batch.is_inside:
            return batch.call(block, forward, args, kwargs)
        # No micro-batch's thread: the training thread, which computes a block for one, or a stranger. Modules inside
        # blocks have no hooks that would refuse the stranger.
        if batch is None:
            self._on.coordinator.lock.check(f"calling {block.name}")
        if batch is None and self._runs_segment_backward:
            raise UnsupportedSchedule(
                f"the model recomputes {block.name} by itself (switch its activation checkpointing off: a vertical step "
                "recomputes blocks anyway)"
            )
        return forward(*args, **kwargs)

    def undo(self, error: BaseException) -> None:
        """Undo a step that ``error`` has cut off, unless some units have been updated.

        Raises:
            StepError: ``error`` asks for a repetition, which is too late.
        """
        on = self._on
        self._clear()
        self._backwards.drop()
        on.module_hooks.forget_calls()
        on.coordinator.abandon_forward()
        if self._guard.phase is Phase.BACKWARD:
            self._guard.move_to(Phase.BROKEN)
        if self._is_final and on.stepper.is_between_steps:
            if isinstance(error, UnsupportedSchedule):
                raise StepError.not_vertical(str(error), step=self._options.step) from error
            return
        on.stepper.clear()
        for other, gradient in self._others:
            other.grad = gradient
        if self._guard.phase is Phase.BROKEN:
            self._guard.move_to(Phase.READY)

    def _clear(self) -> None:
        for batch in self._batches:
            batch.clear()
        self.checkpoints.close()


def _name(arrival: BlockArrival | None) -> str:
    if arrival is None:
        return "none"
    return arrival.block.name if arrival.with_gradient else f"{arrival.block.name} without gradient"
