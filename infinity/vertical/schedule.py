"""Steps that go vertically, one after the other, as long as the model allows.

Knows when a step may be tried and what a failure means; must not know what happens in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from infinity.activations.refusal import LastingRefusal, Refusal
from infinity.errors import EngineClosedError
from infinity.paging.saved_tensors import is_saved_otherwise
from infinity.planning.cost_model import Traffic
from infinity.vertical.baton import Abandoned, Lanes
from infinity.vertical.interception import Interception
from infinity.vertical.replay import ambient
from infinity.vertical.replay.buffer_watch import Key
from infinity.vertical.replay.effects import StepStart
from infinity.vertical.step import Loop, Surroundings, Terms, VerticalStep
from infinity.vertical.tied import Key as ParameterKey
from swapper import SwapperError
from swapper.sync.interrupts import uninterrupted

_NUM_IN_MEMORY = 2
"""Tensors that a `Boundary` has in memory at least, whatever room there is."""


class VerticalSchedule:
    """Runs steps vertically, as long as the model allows."""

    def __init__(self, surroundings: Surroundings, loop: Loop) -> None:
        """``surroundings``, ``loop``: see there."""
        self._on = surroundings
        self._loop = loop
        self._suitability = surroundings.suitability
        self._interception = Interception(surroundings.module_hooks, surroundings.blocks)
        self._lanes = Lanes()
        self._start: StepStart | None = None
        self._tied: list[ParameterKey] = []
        self._written: set[Key] = set()
        """Buffers of which it is known that each is used at one place only."""
        self._anchor = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        self.traffic = Traffic(is_vertical=self._suitability.is_expected)
        """What the order of the last step, or before it of the first one, means for the bytes that a step moves."""

    def obstacle(self) -> str | None:
        """Why the next step cannot go vertically; None if it can be tried."""
        return (
            self._suitability.reason_against
            or (None if self._interception.sites else "the model has no repeated blocks")
            or (
                "gradients of earlier micro-batches wait for their step" if self._on.stepper.gradients.has_any else None
            )
            or self._hooks_of_the_user()
            or (
                "hooks for saved tensors are active, and would not see what is recomputed"
                if is_saved_otherwise()
                else None
            )
            or ambient.obstacle()
        )

    def _hooks_of_the_user(self) -> str | None:
        for unit in self._on.module_hooks.units:
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                # One is the engine's own.
                if slot.spec.is_trainable and len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
                    return (
                        f"'{slot.spec.fqn}' has a hook for its accumulated gradient, which would see each micro-batch's"
                    )
        return None

    def run(
        self,
        compute_losses: Sequence[Callable[[], torch.Tensor]],
        divisor: int | None = None,
        *,
        updates: bool = True,
        keeps_bits: bool = False,
    ) -> list[torch.Tensor] | str:
        """Forward and backward of all micro-batches.

        Args:
            compute_losses: one function per micro-batch, which runs the model and gives the loss.
            divisor: of each loss; None: their number.
            updates: whether a unit may be updated before all gradients have come.
            keeps_bits: whether to keep to the bits of one micro-batch after the other: then what would change them is a
                reason against, or, if the config asks for vertical steps, a warning.

        Returns:
            The losses, detached. Or, in words, why the step has to be done in the ordinary order; then everything is as
            if nothing had happened.
        """
        with self._on.pager.lock.held("engine.train_batch()"):
            terms = Terms(divisor or len(compute_losses), updates)
            if keeps_bits:
                if not self._suitability.is_proven:
                    self._tied = self._find_tied()
                terms = replace(terms, note_difference=self._note_difference, tied=self._tied)
            return self._run(compute_losses, terms)

    def _find_tied(self) -> list[ParameterKey]:
        """The parameters between blocks that two modules have, and of whose gradients there is room for some."""
        on, hooks = self._on, self._on.module_hooks
        capacity_bytes = on.activation_bytes if on.device.shares_host_memory else None
        found = []
        for unit in hooks.units if capacity_bytes is not None else ():
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                fits = _NUM_IN_MEMORY * parameter.numel() * parameter.itemsize <= (capacity_bytes or 0)
                if slot.spec.is_trainable and fits and not self._interception.is_unit(unit):
                    found.append((unit.index, slot.index))
        owners = hooks.num_owners()
        return [key for key in found if owners.get(key) == 2]

    def _note_difference(self, what: str) -> None:
        if not self._suitability.note_difference(what):
            raise LastingRefusal(what)

    def _run(self, compute_losses: Sequence[Callable[[], torch.Tensor]], terms: Terms) -> list[torch.Tensor] | str:
        torch_device = self._on.device.torch_device
        self._on.module_hooks.follow_compilation()
        self._start = StepStart(self._on.module_hooks.model, torch_device, self._start, self._written)
        is_trial = not self._suitability.is_proven
        step = VerticalStep(self._on, self._loop, self._interception, terms, self._written, is_trial=is_trial)
        resumed_bytes = self._on.stepper.gradients.resumed_bytes
        try:
            with self._interception.active(step.on_call):
                losses = step.run(self._lanes, compute_losses, self._anchor.to(torch_device), self._start)
        except Exception as error:
            self._cut_off(step, error)
            # Whatever went wrong in the first step, if it is the model's own fault it will show in the ordinary order too.
            is_foreign = step.is_trial and not isinstance(error, SwapperError | EngineClosedError)
            if not is_foreign and not isinstance(error, Refusal):
                raise
            self._start.restore()
            reason = str(error) if isinstance(error, Refusal) else f"it failed with {type(error).__name__}: {error}"
            self._suitability.note_failure(reason, is_final=isinstance(error, LastingRefusal))
            self.traffic = Traffic()
            return reason
        except BaseException as error:
            self._cut_off(step, error)
            if isinstance(error, Abandoned):  # the engine was closed by the model's own code
                raise EngineClosedError("a step under way") from error
            raise
        finally:
            self._lanes.close_if_asked()
        self._suitability.note_success()
        self._written.update(step.written)
        # In a trial all gradients wait for the end, which is not how it goes on.
        resumed_bytes = 0 if is_trial else self._on.stepper.gradients.resumed_bytes - resumed_bytes
        self.traffic = Traffic(is_vertical=True, spilled_bytes=step.boundary.spilled_bytes, resumed_bytes=resumed_bytes)
        self._on.space.tidy()
        # Outside of what would begin anew in the ordinary order.
        self._on.stepper.gradients.average_last(self._loop.step())
        return losses

    def _cut_off(self, step: VerticalStep, error: BaseException) -> None:
        with uninterrupted():
            self._lanes.abandon()
            self._interception.restore()
            step.undo(error)

    def note_ordinary(self, reason: str | None = None) -> None:
        """A step goes in the ordinary order, or a part of it; ``reason`` is logged once."""
        self.traffic = Traffic()
        if reason is not None and self._suitability.reason_against is None:
            self._suitability.say(reason)

    def forgive(self) -> None:
        """The ordinary order failed as well: see `Suitability.forgive`."""
        self._suitability.forgive()

    def close(self) -> None:
        """End the threads."""
        self._interception.restore()
        self._lanes.close()
