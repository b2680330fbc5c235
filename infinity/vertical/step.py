"""One step, unit by unit over all its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import Any

import torch

from infinity.activations.activation_checkpoints import ActivationCheckpoints
from infinity.activations.spilled import SpillSpace
from infinity.activations.unsupported import NeverSupportedSchedule, UnsupportedSchedule
from infinity.device.compute import ComputeDevice
from infinity.errors import StepError
from infinity.loop.backward import Backwards
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.loop.phase import Phase, PhaseGuard
from infinity.loop.vertical_forward import VerticalForward, present
from infinity.metrics.clock import StepClock
from infinity.paging.parameter_map import ParameterMap
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper
from infinity.vertical.buffers import StepStart
from infinity.vertical.call import Block
from infinity.vertical.handoff import MicroBatchThread
from infinity.vertical.interception import Interception
from infinity.vertical.microbatch import Arrival, MicroBatch
from infinity.vertical.schedule_selector import ScheduleSelector
from infinity.vertical.sums import Key, TiedParts, UnitSums
from infinity.vertical.thread_state import RandomState


@dataclass(frozen=True)
class StepContext:
    """The parts of an engine that vertical steps work with."""

    parameter_map: ParameterMap
    module_hooks: ModuleHooks
    coordinator: ParameterCoordinator
    stepper: Stepper
    clock: StepClock
    device: ComputeDevice
    space: SpillSpace
    activation_bytes: int | None
    """Host memory for inputs of units; None: they stay where they are."""
    blocks: tuple[str, ...]
    """FQNs of the modules that were made units of their own."""
    selector: ScheduleSelector


@dataclass(frozen=True)
class StepOptions:
    """What is asked of a step."""

    step: int
    """Its number."""
    divisor: int
    """Of each loss."""
    updates: bool = True
    """Whether a unit may be updated before all gradients have come."""
    keeps_bits: bool = False
    """Whether to keep to the bits of one micro-batch after the other: then what would change them is a reason against, or, if
    the config asks for vertical steps, a warning."""
    tied: Collection[Key] = ()
    """Parameters whose gradients come in two parts, which are added up as they would be one micro-batch after the other."""


@dataclass(eq=False)
class VerticalStep:
    """One step."""

    _on: StepContext
    _backwards: Backwards
    _guard: PhaseGuard
    interception: InitVar[Interception]
    _options: StepOptions
    is_trial: bool
    """Look closely at everything, and update nothing before the end."""
    _batches: list[MicroBatch] = field(default_factory=list)
    _blocks: list[Block] = field(default_factory=list)
    _losses: list[torch.Tensor] = field(default_factory=list)
    _hooked: set[tuple[int, int, int]] = field(default_factory=set)
    """Gradients that have been through a hook of the user: micro-batch, unit and slot."""
    _others: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    """Parameters that no engine holds, with the gradients that they had: the inter-block graph adds to them."""
    _runs_segment_backward = False
    _is_final = False
    _place = 0
    """What all micro-batches do one after the other before any of them goes on, counted."""
    _drew_at: int | None = None
    _gradient_at: dict[Key, int] = field(default_factory=dict)
    """The moment at which its gradient came."""

    def __post_init__(self, interception: Interception) -> None:
        self.checkpoints = ActivationCheckpoints(
            self._on.space,
            self._on.clock,
            self._on.coordinator.pack,
            self._on.coordinator.unpack,
            self._on.activation_bytes,
        )
        self._tied = TiedParts(self.checkpoints, self._options.tied)
        self._updates_in_backward = self._on.stepper.rules.updates_in_backward and self._options.updates
        self._updates_now = self._updates_in_backward and not self.is_trial
        self._vertical_forward = VerticalForward(self._on.coordinator.parameter_cache, interception.unit_indices)
        self._sums = UnitSums(self._on.stepper, self._on.device, self._updates_now, self._options.step)
        self._units = {unit.index: unit for unit in self._on.parameter_map.units}

    # -------------------------------------------------------------------------------------------------------- the step

    def run(
        self,
        compute_losses: Sequence[Callable[[], torch.Tensor]],
        threads: Sequence[MicroBatchThread],
        start: StepStart,
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches, each in one of ``threads``; returns their losses, detached."""
        on, coordinator = self._on, self._on.coordinator
        found = ((other, other.grad) for other in on.stepper.step_groups.not_held())
        self._others = [(other, None if gradient is None else gradient.clone()) for other, gradient in found]
        coordinator.begin_vertical(self._vertical_forward)
        self._backwards.collector.begin_collecting()
        for index, (compute_loss, thread) in enumerate(zip(compute_losses, threads, strict=True)):
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
        self._finish()
        return self._losses

    def _forward(self) -> None:
        coordinator = self._on.coordinator
        while (block := self._advance()) is not None:
            self._blocks.append(block)
            self._place += 1
            self._vertical_forward.begin_moment(2 * len(self._blocks) - 1)
            coordinator.enter(block.unit)
            try:
                for batch in self._batches:
                    self._resume(batch)
                    if batch.arrival is not None or batch.is_over:
                        raise UnsupportedSchedule(f"{block.name} raises an error, and the model goes on")
            finally:
                coordinator.leave(block.unit)
            self._vertical_forward.begin_moment(2 * len(self._blocks))

    def _advance(self) -> Block | None:
        """All micro-batches go on to the next block. Returns where they have arrived; None at the end of forward."""
        first: Arrival | None = None
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
            # Not `_differs`: adapters that one micro-batch has switched off would be off for the others.
            raise NeverSupportedSchedule(
                "a micro-batch calls the model several times, and what it sets in between holds for all of them"
            )
        return first.block

    def _resume(self, batch: MicroBatch) -> None:
        random = RandomState(self._on.device.torch_device) if self._options.keeps_bits else None
        batch.resume()
        if random is not None and not random.is_unchanged():
            if self._drew_at not in (None, self._place):
                self._differs(
                    "random numbers are drawn at several places of the model, so micro-batches get other ones"
                )
            self._drew_at = self._place
        self._on.coordinator.pause()

    def _differs(self, what: str) -> None:
        """This makes bits differ from those of one micro-batch after the other. In a trial nothing is updated yet."""
        if self._options.keeps_bits and not self._on.selector.on_difference(what):
            raise NeverSupportedSchedule(what)

    def _end_forward(self, batch: MicroBatch) -> None:
        """A micro-batch has its loss: its backward begins at once, so that no more than one's logits are in memory."""
        on = self._on
        loss = batch.end_forward()
        self._guard.check_backward(loss)
        self._losses.append(loss.detach())
        with torch.enable_grad():
            scaled = on.stepper.scaler.scale_loss(loss, self._options.divisor)
        if not scaled.requires_grad:
            raise UnsupportedSchedule("the loss does not depend on the parameters")
        batch.graph.seal(scaled)
        for unit, slot in self._tied.tied:
            if id(self._units[unit].parameters[slot]) in batch.graph.repeated:
                self._record_places(unit, slot)
        del scaled, loss
        if self._guard.phase is Phase.READY:
            self._guard.move_to(Phase.BACKWARD)
        with self._vertical_forward.in_between(), self._on.coordinator.as_if_inside(False):
            self._run_segment(batch, len(batch.calls) + 1)

    def _check(self, start: StepStart) -> None:
        """Nothing has been updated yet: the last chance to begin anew."""
        self.checkpoints.check_unchanged()
        writing = [block for block in self._blocks if block.buffers.are_written]
        for block in writing:
            if writing.count(block) > 1:
                raise UnsupportedSchedule(f"{block.name} writes to its buffers and is called several times")
        changed = start.changed_buffer({module for block in writing for module in block.buffers.modules})
        if changed is not None:
            raise UnsupportedSchedule(f"the model's forward changes the buffer {changed} between its blocks")

    def _backward(self) -> None:
        positions = range(len(self._blocks), 0, -1)
        calls = (batch.calls[position - 1] for position in positions for batch in self._batches)
        inputs = (kept for call in calls if call is not None for kept in call.kept)
        self.checkpoints.begin_backward(chain(inputs, self._tied.kept))
        self._is_final = self._updates_now
        if self._options.updates and not self.is_trial:
            self._on.stepper.begin_last(self._options.step, updates_now=self._updates_now)
        self._end_moment(2 * len(self._blocks))
        for position in positions:
            self._backward_of_unit(position, self._blocks[position - 1].unit)
            self._end_moment(2 * position - 1)
            for batch in self._batches:
                self._run_segment(batch, position)
            self._end_moment(2 * position - 2)

    def _backward_of_unit(self, position: int, unit: Unit) -> None:
        calls = [(batch, call) for batch in self._batches if (call := batch.calls[position - 1]) is not None]
        for batch, call in calls:
            batch.graph.deliver(call)
        if not any(call.has_gradient for _, call in calls):
            for _, call in calls:
                if not call.is_over:
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
        """A unit is computed once more, outside of autograd's backward."""
        with self._on.coordinator.as_if_inside(True), torch.enable_grad(), self._on.coordinator.saving:
            yield

    def _run_segment(self, batch: MicroBatch, position: int) -> None:
        self._runs_segment_backward = True
        try:
            batch.graph.run(position)
        finally:
            self._runs_segment_backward = False
        self._gather(batch, 2 * position - 2)

    def _gather(self, batch: MicroBatch, moment: int) -> None:
        for unit, gradients in self._backwards.collector.pop_gradients():
            for slot in gradients:
                key = unit.index, slot.index
                if key not in self._tied.tied and self._gradient_at.setdefault(key, moment) != moment:
                    self._record_places(*key)
                if unit.parameters[slot.index]._backward_hooks:
                    if (batch.index, unit.index, slot.index) in self._hooked:
                        raise UnsupportedSchedule(
                            f"'{slot.spec.fqn}' is used in several blocks and has a hook for its gradient"
                        )
                    self._hooked.add((batch.index, unit.index, slot.index))
            self._sums.add(unit, self._joined(batch, unit, gradients, moment))
        for index, _ in self._tied.waiting_of(batch.index):
            unit = self._units[index]
            if self._vertical_forward.first_moments.get(index) == moment:  # nothing more has come of them
                self._sums.add(unit, self._joined(batch, unit, {}, moment))
        self._on.coordinator.pause()

    def _joined(
        self, batch: MicroBatch, unit: Unit, gradients: dict[Slot, torch.Tensor], moment: int
    ) -> dict[Slot, torch.Tensor]:
        """``gradients`` without those of which another part is to come; see [Note: parts] in `infinity.vertical.sums`."""
        is_last = self._vertical_forward.first_moments.get(unit.index) == moment
        for index, number in self._tied.tied:
            slot = unit.layout.slots[number] if index == unit.index else None
            if slot is not None and (slot in gradients or is_last):
                whole = self._tied.join(batch.index, (index, number), gradients.pop(slot, None), is_last=is_last)
                if whole is not None:
                    gradients[slot] = whole
        return gradients

    def _record_places(self, unit: int, slot: int) -> None:
        fqn = self._units[unit].layout.slots[slot].spec.fqn
        self._differs(f"'{fqn}' is used at several places, and the parts of its gradient are added up in another order")

    def _end_moment(self, moment: int) -> None:
        firsts = self._vertical_forward.first_moments
        self._sums.end_moment({index: self._units[index] for index, first in firsts.items() if first == moment})
        self._on.coordinator.parameter_cache.due.clear()

    def _finish(self) -> None:
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

    def on_call(self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block, or a module that lies in one, is called."""
        batch = present.micro_batch
        if batch is not None and not batch.is_inside:
            return batch.call(block, forward, args, kwargs)
        if batch is None:  # maybe another thread's: inside a block no hook of ours says so
            self._on.coordinator.lock.check(f"calling {block.name}")
        if batch is None and self._runs_segment_backward:
            raise UnsupportedSchedule(
                f"the model recomputes {block.name} by itself (switch its activation checkpointing off: a vertical step "
                "recomputes blocks anyway)"
            )
        return forward(*args, **kwargs)

    def undo(self, error: BaseException) -> None:
        """The step was cut off by ``error``: forget it, unless some units have been updated."""
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

    def forbid(self) -> None:
        """The engine is closed, by the model's own code: micro-batches do not go on behind the next block."""
        for batch in self._batches:
            batch.forbid()

    def _clear(self) -> None:
        for batch in self._batches:
            batch.clear()
        self.checkpoints.close()


def _name(arrival: Arrival | None) -> str:
    if arrival is None:
        return "none"
    return arrival.block.name if arrival.with_gradient else f"{arrival.block.name} without gradient"
