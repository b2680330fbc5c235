"""Backwards, from their first gradient to their last: those of ``engine.backward`` and those that the user runs himself.

Knows the phase of the loop, the collector and the stepper; must not know the user's calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.collector import GradientCollector
from infinity.errors import StepOrderError
from infinity.holding import ModelHolding
from infinity.layout import Slot
from infinity.loop_guard import LoopGuard, Phase
from infinity.pager import Pager, in_backward
from infinity.stepper import Stepper
from infinity.unit import Unit


class Backwards:
    """Leads gradients from autograd to the stepper, micro-batch by micro-batch."""

    def __init__(
        self,
        holding: ModelHolding,
        pager: Pager,
        stepper: Stepper,
        guard: LoopGuard,
        *,
        is_boundary: Callable[[], bool],
        step: Callable[[], int],
    ) -> None:
        """
        Args:
            holding, pager, stepper, guard: whom it works with.
            is_boundary: whether the present micro-batch of ``engine.backward`` is the last of its step.
            step: the number of the present step, for messages.
        """
        self._pager = pager
        self._stepper = stepper
        self._guard = guard
        self._is_boundary = is_boundary
        self._step = step
        self._deferred_error: Exception | None = None
        self._has_stale_gradients = False
        self.collector = GradientCollector(
            holding.units,
            holding.num_owners(),
            self._deliver,
            self._notice,
            step,
            handles=holding.handles_of_others,
        )
        pager.on_backward_use = self._note_use
        pager.on_backward_end = self._end_own_of_user

    def run(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch of the engine's loop, with everything that follows from it."""
        self._guard.move_to(Phase.BACKWARD)
        updates_now = self._updates_now()
        is_complete = False
        self._pager.clock.begin_compute("backward")
        try:
            loss.backward()
            self.collector.finish()
            self._stepper.finish_backward(updates_now=updates_now)
            is_complete = True
        finally:
            self._guard.move_to(Phase.READY if is_complete else Phase.BROKEN)
            # Before a step that changes all weights, nothing is worth fetching.
            steps_next = self._is_boundary() and not self._stepper.rules.updates_in_backward
            self._pager.end_backward(is_complete=is_complete, fetches=is_complete and not steps_next)
            if not is_complete:
                self.collector.drop()

    def _updates_now(self) -> bool:
        is_last = self._guard.phase is Phase.BACKWARD and self._is_boundary()
        return is_last and self._stepper.rules.updates_in_backward

    def _notice(self) -> None:
        if self._stepper.scaler.is_active and self._guard.phase is not Phase.BACKWARD:
            raise StepOrderError(
                "loss.backward()",
                "with fp16 the loss has to be scaled, and the step undoes that",
                cure="Call engine.backward(loss) and engine.step()",
                step=self._step(),
            )
        if self._has_stale_gradients and self._guard.phase is not Phase.BACKWARD:
            raise StepOrderError(
                "backward",
                "torch would add its gradients to those of the last step, which are gone",
                cure="Call optimizer.zero_grad() between optimizer.step() and the next backward",
                step=self._step(),
            )
        self._pager.note_backward()

    def _deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        # Without a history it is not known whether backward will still need the weights: see `infinity.collector`.
        self._stepper.deliver(unit, gradients, updates_now=self._updates_now() and self.collector.has_history)

    def _note_use(self, unit: Unit, is_saved: bool) -> None:
        self.collector.note_use(unit, is_saved=is_saved, is_updated=unit.index in self._stepper.updated)

    def _end_own_of_user(self) -> None:
        """Autograd tells that a backward has ended. An error raised here would be lost: the next call raises it."""
        if self._guard.phase is Phase.READY and self.collector.has_fired:
            try:
                self._finish_own_of_user()
            except Exception as error:
                self._deferred_error = error

    def collect(self) -> None:
        """Take note of what a ``loss.backward()`` of the user left."""
        if self._guard.phase is Phase.READY and self.collector.has_fired and not in_backward():
            self._finish_own_of_user()

    def _finish_own_of_user(self) -> None:
        is_whole = False
        self._guard.has_backward = True
        try:
            self.collector.finish()
            is_whole = True
        finally:
            if not is_whole:
                self._guard.move_to(Phase.BROKEN)
            self._pager.end_backward(is_complete=is_whole, fetches=False)

    def before_gradient_access(self) -> None:
        """A ``parameter.grad`` is read or set. ``model.zero_grad()`` does that with each, and finds it gone."""
        self._has_stale_gradients = False
        self.collect()

    def end_step(self, *, leaves_gradients: bool) -> None:
        """A step has ended. ``leaves_gradients``: torch would still have them, and add to them."""
        self._has_stale_gradients = leaves_gradients

    def drop(self) -> None:
        """Forget the gradients that came since the last step."""
        self._has_stale_gradients = False
        self.collector.drop()

    def raise_deferred(self) -> None:
        """Raise what went wrong where it could not be raised."""
        error, self._deferred_error = self._deferred_error, None
        if error is not None:
            raise error
