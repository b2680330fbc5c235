"""One step, unit by unit over all its micro-batches.

Knows the order of things; must not know how a call is computed or where gradients go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from infinity.activations.boundary import Boundary
from infinity.activations.refusal import Refusal
from infinity.activations.spill_space import SpillSpace
from infinity.device.compute import ComputeDevice
from infinity.errors import ScheduleError
from infinity.loop.backward import Backwards
from infinity.loop.phase import Phase, PhaseGuard
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.telemetry.clock import StepClock
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper
from infinity.vertical.baton import Failed, Finished, Lanes
from infinity.vertical.call import Site
from infinity.vertical.eligibility import Suitability
from infinity.vertical.interception import Interception
from infinity.vertical.microbatch import Arrived, Computed, MicroBatch, Tools, present
from infinity.vertical.replay.ambient import RandomState, process_state
from infinity.vertical.replay.buffer_watch import BufferWatch, Key, has_own_writers
from infinity.vertical.replay.effects import StepStart
from infinity.vertical.shared_forward import SharedForward
from infinity.vertical.sums import UnitSums
from infinity.vertical.tied import Key as ParameterKey
from infinity.vertical.tied import TiedParts


@dataclass(frozen=True)
class Surroundings:
    """The parts of an engine that vertical steps work with."""

    module_hooks: ModuleHooks
    pager: Pager
    stepper: Stepper
    clock: StepClock
    device: ComputeDevice
    space: SpillSpace
    activation_bytes: int | None
    """Host memory for inputs of units; None: they stay where they are."""
    blocks: tuple[str, ...]
    """FQNs of the modules that were made units of their own."""
    suitability: Suitability


@dataclass(frozen=True)
class Loop:
    """The engine's loop, seen from a step."""

    backwards: Backwards
    guard: PhaseGuard
    step: Callable[[], int]
    """Gives the number of the present step."""
    note_loss: Callable[[torch.Tensor, int], None]
    """Called with each micro-batch's loss and that number."""


@dataclass(frozen=True)
class Terms:
    """What is asked of a step."""

    divisor: int
    """Of each loss."""
    updates: bool = True
    """Whether a unit may be updated before all gradients have come."""
    note_difference: Callable[[str], None] | None = None
    """Called with what makes bits differ from those of one micro-batch after the other, without checkpointing; may raise
    `Refusal`. In a trial that is before any update. None: it is not looked for."""
    tied: Collection[ParameterKey] = ()
    """Parameters whose gradients come in two parts, which are added up as they would be one micro-batch after the other."""


class VerticalStep:
    """One step."""

    def __init__(
        self,
        on: Surroundings,
        loop: Loop,
        interception: Interception,
        terms: Terms,
        known: Set[Key],
        *,
        is_trial: bool,
    ) -> None:
        self._on = on
        self._loop = loop
        self._terms = terms
        self.is_trial = is_trial
        self.written: set[Key] = set()
        """Buffers that the forward has written to."""
        self._known = known
        self._watch = (
            BufferWatch(on.module_hooks.model) if is_trial or has_own_writers(on.module_hooks.model, known) else None
        )
        self.boundary = Boundary(on.space, on.clock, on.pager.pack, on.pager.unpack, on.activation_bytes)
        self._tied = TiedParts(self.boundary, terms.tied)
        self._updates_in_backward = on.stepper.rules.updates_in_backward and terms.updates
        self._updates_now = self._updates_in_backward and not is_trial
        self._shared = SharedForward(on.pager, interception)
        self._sums = UnitSums(on.stepper, on.device, updates_now=self._updates_now, step=loop.step())
        self._batches: list[MicroBatch] = []
        self._sites: list[Site] = []
        self._losses: list[torch.Tensor] = []
        self._units = {unit.index: unit for unit in on.module_hooks.units}
        self._hooked: set[tuple[MicroBatch, int, int]] = set()
        """Gradients that have been through a hook of the user."""
        self._process_state = process_state()
        self._others: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters that no engine holds, with the gradients that they had: the glue adds to them."""
        self._runs_glue_backward = False
        self._is_final = False
        self._place = 0
        """What all micro-batches do one after the other before any of them goes on, counted."""
        self._drew_at: int | None = None
        self._gradient_at: dict[ParameterKey, int] = {}
        """The moment at which its gradient came."""

    # -------------------------------------------------------------------------------------------------------- the step

    def run(
        self,
        lanes: Lanes,
        compute_losses: Sequence[Callable[[], torch.Tensor]],
        anchor: torch.Tensor,
        start: StepStart,
    ) -> list[torch.Tensor]:
        on = self._on
        pager = on.pager
        hooks = (pager.pack, pager.unpack)
        tools = Tools(self.boundary, on.device, anchor, self.is_trial, self._watch, hooks, pager.lock)
        found = ((other, other.grad) for other in on.stepper.step_groups.not_held())
        self._others = [(other, None if gradient is None else gradient.clone()) for other, gradient in found]
        pager.share(self._shared)
        self._loop.backwards.collector.begin_handing_out()
        for index, lane in enumerate(lanes.take(len(compute_losses))):
            self._batches.append(MicroBatch(index, lane, compute_losses[index], tools))
        self._forward(start)
        self._shared.begin_moment(None)
        pager.end_forward()
        self._check(start)
        self._backward()
        if self.is_trial:
            self._check_attributes(start)
        self._finish()
        return self._losses

    def _forward(self, start: StepStart) -> None:
        pager = self._on.pager
        while (site := self._advance(start)) is not None:
            self._sites.append(site)
            self._place += 1
            self._shared.begin_moment(2 * len(self._sites) - 1)
            pager.enter(site.unit)
            try:
                for batch in self._batches:
                    if not isinstance(self._resume(batch), Computed):
                        raise Refusal(f"{site.name} raises an error, and the model goes on")
            finally:
                pager.leave(site.unit)
            self._shared.begin_moment(2 * len(self._sites))

    def _advance(self, start: StepStart) -> Site | None:
        """All micro-batches go on to the next unit. Returns where they have arrived; None at the end of forward."""
        first: Any = None
        self._place += 1
        for batch in self._batches:
            message = self._resume(batch)
            if isinstance(message, Finished):
                self._end_forward(batch, message.value)
            what = message if isinstance(message, Arrived) else None
            if process_state() != self._process_state:
                raise Refusal("the model's forward sets something for the whole process while it calls its blocks")
            if what is not None and self._terms.note_difference is not None:
                begins_model = not self._sites or what.site is self._sites[0]
                if begins_model or self.is_trial:  # which a loss function may have changed for the time of the call
                    self._check_attributes(start)
            if batch is not self._batches[0] and what != first:
                raise Refusal(f"micro-batches call different blocks: {_name(first)}, {_name(what)}")
            first = what
        return first.site if first is not None else None

    def _resume(self, batch: MicroBatch) -> Any:
        is_asked = self._terms.note_difference is not None
        random = RandomState(self._on.device.torch_device) if is_asked else None
        message = batch.resume()
        if isinstance(message, Failed):
            raise message.error
        if random is not None and not random.is_present():
            if self._drew_at not in (None, self._place):
                self._differs(
                    "random numbers are drawn at several places of the model, so micro-batches get other ones"
                )
            self._drew_at = self._place
        self._on.pager.pause()
        return message

    def _differs(self, what: str) -> None:
        if self._terms.note_difference is not None:
            self._terms.note_difference(what)

    def _end_forward(self, batch: MicroBatch, loss: Any) -> None:
        """A micro-batch has its loss: its backward begins at once, so that no more than one's logits are in memory."""
        on = self._on
        self._loop.guard.check_backward(loss)
        self._loop.note_loss(loss, self._loop.step())
        self._losses.append(loss.detach())
        with torch.enable_grad():
            share = on.stepper.scaler.share_of(loss, self._terms.divisor)
        if not share.requires_grad:
            raise Refusal("the loss does not depend on the parameters")
        batch.glue.seal(share)
        for unit, slot in self._tied.tied:
            if id(self._units[unit].parameters[slot]) in batch.glue.repeated:
                self._note_places(unit, slot)
        batch.end_forward()
        del share, loss
        if self._loop.guard.phase is Phase.READY:
            self._loop.guard.move_to(Phase.BACKWARD)
        with self._shared.in_between():
            self._run_glue(batch, len(batch.calls) + 1)

    def _check(self, start: StepStart) -> None:
        """Nothing has been updated yet: the last chance to begin anew."""
        self.boundary.check_unchanged()
        self._check_attributes(start)
        for batch in self._batches:
            for call in batch.calls:
                if call is not None:
                    call.check_arguments()
        written = [site for site in self._sites if site.buffers.are_written]
        for site in written:
            if written.count(site) > 1:
                raise Refusal(f"{site.name} writes to its buffers and is called several times")
        self._check_buffers(start)

    def _check_attributes(self, start: StepStart) -> None:
        if start.too_much is not None:
            raise Refusal(f"{start.too_much} holds more than can be compared before and after a forward")
        changed = start.changed(is_thorough=self.is_trial)
        if changed is not None:
            raise Refusal(f"the model's forward changes {changed}")

    def _check_buffers(self, start: StepStart) -> None:
        """See [Note: places] in `infinity.vertical.replay.buffer_watch`."""
        for key, name in start.written_buffers(is_thorough=self.is_trial).items():
            self.written.add(key)
            if self._watch is not None and not self._watch.is_used_at_one_place(key):
                raise Refusal(f"the model's forward writes to the buffer {name}, and uses it at several places")
            if self._watch is None and key not in self._known:
                raise Refusal(f"the model's forward begins to write to the buffer {name}")

    def _backward(self) -> None:
        positions = range(len(self._sites), 0, -1)
        calls = (batch.calls[position - 1] for position in positions for batch in self._batches)
        inputs = (kept for call in calls if call is not None for kept in call.kept)
        self.boundary.begin_backward(chain(inputs, self._tied.kept))
        self._is_final = self._updates_now
        if self._terms.updates and not self.is_trial:
            self._on.stepper.begin_last(self._loop.step(), updates_now=self._updates_now)
        self._end_moment(2 * len(self._sites))
        for position in positions:
            self._backward_of_unit(position, self._sites[position - 1].unit)
            self._end_moment(2 * position - 1)
            for batch in self._batches:
                self._run_glue(batch, position)
            self._end_moment(2 * position - 2)

    def _backward_of_unit(self, position: int, unit: Unit) -> None:
        calls = [(batch, call) for batch in self._batches if (call := batch.calls[position - 1]) is not None]
        for batch, call in calls:
            batch.glue.deliver(call)
        if not any(call.has_gradient for _, call in calls):
            for _, call in calls:
                if not call.is_over:
                    call.drop()
            return
        self._on.pager.enter(unit)
        try:
            for batch, call in calls:
                if call.is_over:
                    continue
                if not call.has_gradient:
                    call.drop()
                    continue
                for edge, gradient in call.backward(self._recomputing, batch.glue.take):
                    if batch.glue.add(edge, gradient):
                        self._differs(
                            "a block gets one value as several tensors, and the parts of its gradient are added up in "
                            "another order"
                        )
                self._gather(batch, 2 * position - 1)
        finally:
            self._on.pager.leave(unit)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """A unit is computed once more, outside of autograd's backward."""
        with self._on.pager.as_if_inside(True), torch.enable_grad(), self._on.pager.saving:
            yield

    def _run_glue(self, batch: MicroBatch, position: int) -> None:
        self._runs_glue_backward = True
        try:
            batch.glue.run(position)
        finally:
            self._runs_glue_backward = False
        self._gather(batch, 2 * position - 2)

    def _gather(self, batch: MicroBatch, moment: int) -> None:
        for unit, gradients in self._loop.backwards.collector.take():
            for slot in gradients:
                key = unit.index, slot.index
                if key not in self._tied.tied and self._gradient_at.setdefault(key, moment) != moment:
                    self._note_places(*key)
                if unit.parameters[slot.index]._backward_hooks:
                    if (batch, unit.index, slot.index) in self._hooked:
                        raise Refusal(f"'{slot.spec.fqn}' is used in several blocks and has a hook for its gradient")
                    self._hooked.add((batch, unit.index, slot.index))
            self._sums.add(unit, self._joined(batch, unit, gradients, moment))
        for index, _ in self._tied.waiting_of(batch.index):
            unit = self._units[index]
            if self._shared.first_moments.get(index) == moment:  # nothing more has come of them
                self._sums.add(unit, self._joined(batch, unit, {}, moment))
        self._on.pager.pause()

    def _joined(
        self, batch: MicroBatch, unit: Unit, gradients: dict[Slot, torch.Tensor], moment: int
    ) -> dict[Slot, torch.Tensor]:
        """``gradients`` without those of which another part is to come; see [Note: parts] in `infinity.vertical.tied`."""
        is_last = self._shared.first_moments.get(unit.index) == moment
        for index, number in self._tied.tied:
            slot = unit.layout.slots[number] if index == unit.index else None
            if slot is not None and (slot in gradients or is_last):
                whole = self._tied.join(batch.index, (index, number), gradients.pop(slot, None), is_last=is_last)
                if whole is not None:
                    gradients[slot] = whole
        return gradients

    def _note_places(self, unit: int, slot: int) -> None:
        fqn = self._units[unit].layout.slots[slot].spec.fqn
        self._differs(f"'{fqn}' is used at several places, and the parts of its gradient are added up in another order")

    def _end_moment(self, moment: int) -> None:
        firsts = self._shared.first_moments
        self._sums.end_moment({index: self._units[index] for index, first in firsts.items() if first == moment})
        self._on.pager.residency.due.clear()

    def _finish(self) -> None:
        on = self._on
        updates = self._updates_in_backward
        self._loop.backwards.collector.end_handing_out()
        on.stepper.finish_backward(updates_now=updates)
        self._loop.guard.move_to(Phase.READY)
        on.pager.end_sharing()
        # Before a step that changes all weights, nothing is worth fetching.
        on.pager.end_backward(is_complete=True, fetches=updates and on.stepper.updates_all_in_backward)
        self._clear()

    # -------------------------------------------------------------------------------------------------------- around it

    def on_call(self, site: Site, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module that lies in a block is called."""
        batch = present()
        if batch is not None and not batch.is_inside:
            return batch.call(site, forward, args, kwargs)
        if batch is None and self._runs_glue_backward:
            raise Refusal(
                f"the model recomputes {site.name} by itself (switch its activation checkpointing off: a vertical step "
                "recomputes blocks anyway)"
            )
        return forward(*args, **kwargs)

    def undo(self, error: BaseException) -> None:
        """The step was cut off by ``error``: forget it, unless some units have been updated."""
        on = self._on
        self._clear()
        self._loop.backwards.drop()
        on.module_hooks.forget_calls()
        on.pager.abandon_forward()
        if self._loop.guard.phase is Phase.BACKWARD:
            self._loop.guard.move_to(Phase.BROKEN)
        if self._is_final and on.stepper.is_between_steps:
            if isinstance(error, Refusal):
                raise ScheduleError(str(error), step=self._loop.step()) from error
            return
        on.stepper.clear()
        for other, gradient in self._others:
            other.grad = gradient
        if self._loop.guard.phase is Phase.BROKEN:
            self._loop.guard.move_to(Phase.READY)

    def _clear(self) -> None:
        for batch in self._batches:
            batch.clear()
        self.boundary.close()


def _name(arrived: Arrived | None) -> str:
    if arrived is None:
        return "none"
    return arrived.site.name if arrived.with_gradient else f"{arrived.site.name} without gradient"
