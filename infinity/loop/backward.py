"""Backwards from their first gradient to their last: ``engine.backward``, and ``loss.backward()`` of the user."""

from __future__ import annotations

import itertools
from collections.abc import Container
from dataclasses import InitVar, dataclass
from threading import get_ident

import torch

from infinity.activations.unsupported import NeverSupportedSchedule
from infinity.errors import AccessError, StepError
from infinity.gradients.collector import GradientCollector, have_hooks_of_others
from infinity.gradients.live_gradients import LiveGradients
from infinity.loop.accumulation import Accumulation
from infinity.loop.phase import Phase, PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.paging.parameter_cache import ParameterCache
from infinity.paging.parameter_map import ParameterMap
from infinity.threads.engine_lock import EngineLock, refuse_reentry
from infinity.torch_internals.names import call_after_backward, in_backward, is_compiling
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper


@dataclass(eq=False)
class Backwards:
    """Passes gradients from autograd to the stepper, micro-batch by micro-batch."""

    parameter_map: InitVar[ParameterMap]
    _parameter_cache: ParameterCache
    _lock: EngineLock
    """Held by each backward."""
    _stepper: Stepper
    _guard: PhaseGuard
    _live: LiveGradients
    """Gradients that the user holds as ``p.grad``: new ones are added to them."""
    _style: LoopStyle
    """The kind of loop that the user runs."""
    _counts: Accumulation
    """Knows which micro-batch is the last of its step."""
    is_open = False
    """Whether `on_activity` has noticed a backward, which has not ended. After an interrupt: until the next forward."""
    _is_locked = False
    """Whether `on_activity` holds the lock."""
    _is_retained = False
    _has_hooks = False
    _is_own_scaled = False
    _deferred_error: Exception | None = None

    def __post_init__(self, parameter_map: ParameterMap) -> None:
        self._clock = self._parameter_cache.clock
        self._parameters = [unit.parameters for unit in parameter_map.units]
        self.collector = GradientCollector(
            parameter_map.units,
            parameter_map.num_owners(),
            self._deliver,
            lambda unit, gradients: self._stepper.deliver(unit, self._as_parts(unit, gradients), updates_now=False),
            self._on_first_gradient,
            lambda: self._counts.global_steps,
            self._live,
        )

    def run(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run ``engine.backward`` of a micro-batch: autograd, deliveries, and updates that are due.

        ``retain_graph``: as in torch. Another backward follows, so nothing is updated in this one.
        """
        self._guard.move_to(Phase.BACKWARD)
        self._is_retained = retain_graph
        # Asked in each backward, because a script may add hooks at any time.
        self._has_hooks = have_hooks_of_others(itertools.chain.from_iterable(self._parameters))
        updates_now = self._is_final() and self._may_update()
        # Another backward after the last one of a step: means that were left to the step are completed first. Otherwise
        # this backward's gradients would be added to shards of them.
        self._stepper.gradients.average_postponed()
        # Before any update: the divisor is fixed as soon as the first unit is updated.
        if updates_now:
            self._stepper.divide_by(self._style.divisor(is_engine_step=True))
        if self._is_final():
            self._stepper.begin_last(self._counts.global_steps, updates_now=updates_now)
        is_complete = False
        self._clock.begin_compute("backward")
        try:
            with self._style.running():
                loss.backward(retain_graph=retain_graph)
            # Units whose end could not be noticed earlier (checkpoints, shared weights) are complete now.
            self.collector.finish()
            self._stepper.finish_backward(updates_now=updates_now)
            if self._counts.is_boundary() and not self._counts.is_in_no_sync:
                self._stepper.gradients.average_last(self._counts.global_steps)
            is_complete = True
        finally:
            self._guard.move_to(Phase.READY if is_complete else Phase.BROKEN)
            # Before a step that changes all weights, nothing is worth fetching.
            steps_next = self._counts.is_boundary() and not (updates_now and self._stepper.updates_all_in_backward)
            self.end(is_complete=is_complete, fetches=is_complete and not steps_next)
            if not is_complete:
                # Gradients of the part that ran must not be added to those of the next try.
                self.collector.drop()

    def _is_final(self) -> bool:
        """Whether a unit that is complete in this backward has all its gradients of the step."""
        if self._guard.phase is not Phase.BACKWARD or self._is_retained or not self._counts.is_boundary():
            return False
        if self._counts.is_in_no_sync:  # where no step comes, but maybe another backward
            return False
        return not self._has_hooks  # they may look at any gradient

    def _may_update(self) -> bool:
        return self._stepper.updates_in_backward and self._style.updates_in_backward

    def _on_first_gradient(self) -> None:
        is_scaled = self._is_own_scaled or self._guard.phase is Phase.BACKWARD
        # Called with the first gradient of a backward: nobody has used gradients of an unscaled fp16 loss yet.
        if self._stepper.scaler.is_active and not is_scaled:
            raise StepError.order(
                "loss.backward()",
                "Loss scaling is required with fp16 before the backward, and the step undoes it",
                cure="Call engine.backward(loss), or engine.scale(loss).backward(), and engine.step()",
                step=self._counts.global_steps,
            )
        self.on_activity()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a ``loss.backward()`` of the user: with fp16, multiplied by the loss scale, and fp32."""
        self._is_own_scaled = True
        return self._stepper.scaler.scale_loss(loss, 1) if self._stepper.scaler.is_active else loss

    def _deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        # Runs in a hook of autograd, on whatever thread runs the backward.
        gradients = self._as_parts(unit, gradients)
        # What has gradients of earlier micro-batches, and none of this one yet, may still get one.
        main = self._stepper.gradients
        is_whole = self._is_final() and set(main.slots_with_gradient(unit)) <= gradients.keys()
        # Without a history it is not known whether backward will still need the weights: see `infinity.gradients.collector`.
        updates_now = is_whole and self._may_update() and self.collector.has_history
        # Ranks exchange a unit's gradients as soon as it is whole. It must be announced before the last part is added.
        if is_whole:
            main.expect_whole(unit)
        self._stepper.deliver(unit, gradients, updates_now=updates_now)
        if is_whole:
            main.offer(unit)

    def _as_parts(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        used_up = self._stepper.used_up
        for slot in gradients if used_up else ():
            if (unit.index, slot.index) in used_up:  # by the backward before this one
                raise StepError.late_gradient(slot.spec.fqn, unit=unit.name, step=self._counts.global_steps)
        # Not `engine.backward`: see [Note: whose division] in infinity.loop.style.
        if self._guard.phase is not Phase.BACKWARD:
            gradients = dict(self._style.scale_own(gradients))
        self._live.add(unit, gradients)
        return gradients

    def on_weight_use(self, unit: Unit, *, is_saved: bool) -> None:
        """Backward uses a unit's weights, and whether forward had saved them for that."""
        self.collector.on_weight_use(unit, is_saved=is_saved, is_updated=unit.index in self._stepper.updated)

    def on_activity(self) -> None:
        """Called for every event inside a backward. The first one takes the lock, and registers `_ended`.

        `_ended` is called at the end of the innermost running backward. Usually that is the outermost one as well.
        """
        if self.is_open:
            # Autograd may run this backward on several threads of its own; `check` lets those pass.
            if self._lock.owner != get_ident():
                self._lock.check("backward")
            return
        self._guard.check_awake()  # of a graph from before engine.sleep()
        self._lock.acquire("backward")
        self._is_locked = True
        self.is_open = True
        # torch calls it when the innermost running backward ends, be it on one of autograd's threads.
        call_after_backward(self._ended)
        # From here on the prefetch cursor is in the backward half of the record.
        self._parameter_cache.training_schedule.begin_backward()
        self._clock.begin_compute("backward")

    def _ended(self) -> None:
        """Called by autograd when a backward has ended. It would swallow an error, so the next call raises it."""
        if self.is_open:
            self.is_open = False
            try:
                # READY: the script called `loss.backward()`. In BACKWARD, the engine's own call finishes.
                if self._guard.phase is Phase.READY and self.collector.has_fired:
                    self._finish_own_of_user()
            except Exception as error:
                self._deferred_error = error
            finally:
                self.close()

    def close(self) -> None:
        """The backward that `on_activity` noticed has ended, or was cut off: release the lock."""
        self.is_open = False
        if self._is_locked:
            self._is_locked = False
            self._lock.release()

    def break_off(self) -> None:
        """The lock was freed by `reset`: do not release it again."""
        self._is_locked = False

    def end(self, *, is_complete: bool, fetches: bool) -> None:
        """Backward has ended.

        Args:
            is_complete: it ended without an exception, so its record becomes the forecast.
            fetches: start to fetch the units that the next forward needs first.
        """
        if not is_complete:
            self.close()
        self._clock.end_compute()
        self._parameter_cache.unbind_unused()
        if is_complete:
            self._parameter_cache.training_schedule.commit()
            if fetches:
                self._parameter_cache.pump()

    def deliver_pending(self) -> None:
        """Deliver the gradients of a ``loss.backward()`` of the user that has ended."""
        if self._guard.phase is Phase.READY and self.collector.has_fired and not in_backward():
            refuse_reentry("taking in gradients")
            self._finish_own_of_user()

    def _finish_own_of_user(self) -> None:
        is_whole = False
        self._guard.on_backward()
        try:
            self.collector.finish()
            if not self._counts.is_in_no_sync:
                self._stepper.gradients.average(self._counts.global_steps)
            is_whole = True
        finally:
            self._is_own_scaled = False
            if not is_whole:
                self._guard.move_to(Phase.BROKEN)
            # No prefetch: nothing says whether a step or another backward comes next.
            self.end(is_complete=is_whole, fetches=False)

    def before_gradient_access(self, unit: Unit, slot: Slot, *, assigns: bool = False) -> None:
        """A parameter's gradient will be read or replaced: deliver what autograd has accumulated of it.

        Args:
            unit, slot: of the parameter.
            assigns: the script assigns a gradient.

        Raises:
            AccessError: inside the backward of a vertical step, where micro-batches have no gradients of their own; or an
                update in backward has consumed it.
            EngineBusyError: a signal handler or finalizer calls this in the midst of a call.
        """
        if self._lock.is_mine:  # else what a handler is shown counts as looked at, while it is being used up
            refuse_reentry(f"access to the gradient of '{slot.spec.fqn}'")
        if not in_backward():
            # Between backwards: a micro-batch of a vertical step, in its forward, has no gradient of its own.
            self.refuse_together(f"the gradient of '{slot.spec.fqn}' is looked at or changed before the step")
            self.deliver_pending()
            if self._guard.phase is Phase.READY and self._stepper.gradients.has_any:
                # A script that reads gradients before the step needs them there: from now on updates run in the step.
                self._style.on_gradients_read()
        elif self.collector.taker is not None:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="in this backward, which goes unit by unit over all micro-batches, nobody has their sum",
                cure='Set "infinity.schedule": "ordinary" to look at gradients in backward',
            )
        else:
            # In a backward, a hook of the script looks at a gradient that autograd has just accumulated.
            self.collector.deliver_now(unit, slot)
        if assigns:
            self._guard.on_backward()
        if (unit.index, slot.index) in self._stepper.used_up:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="its unit was updated in backward, and the gradient was used up",
                cure='Set "infinity.update": "step" to see or change gradients between backward and step',
            )

    def refuse_together(self, what: str) -> None:
        """Raise `NeverSupportedSchedule` on the thread of a micro-batch in a vertical step, which has no gradients of
        its own.

        A signal handler reads them on the training thread, and torch's compiler on any thread: those are let through.
        """
        if self.collector.taker not in (None, get_ident()) and not is_compiling():
            raise NeverSupportedSchedule(what)

    def on_drop(self) -> None:
        """A gradient was set to None, as ``module.zero_grad()`` does with each."""
        if not self._stepper.gradients.has_any:
            self._style.end_step()

    def drop(self, kept: Container[tuple[int, int]] = ()) -> None:
        """Drop the gradients since the last step, except those ``kept``, by (unit index, slot index)."""
        self._is_own_scaled = False
        self._style.end_step()
        self._style.forget_backwards()
        self.collector.drop(kept)

    def raise_deferred(self) -> None:
        """Raise an error that autograd would have swallowed: see `_ended`."""
        error, self._deferred_error = self._deferred_error, None
        if error is not None:
            raise error
