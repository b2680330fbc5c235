"""The phases of a training loop, and which calls make sense in them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import torch

from infinity.errors import CheckpointError, EngineClosedError, StepError
from infinity.loop.accumulation import Accumulation
from infinity.updates.stepper import Stepper


class Phase(enum.Enum):
    """Where the loop is.

    Legal transitions: READY <-> BACKWARD, STEPPING or ASLEEP, these and READY -> BROKEN -> READY, all -> CLOSED.
    """

    READY = "ready"
    """Between calls. There may be gradients of whole micro-batches."""
    BACKWARD = "backward"
    """Inside ``engine.backward``. Gradients of one micro-batch are incomplete."""
    STEPPING = "stepping"
    """Inside the optimizer's step. Some units may be updated and others not."""
    ASLEEP = "asleep"
    """The engine has released its memory until ``engine.wake()``."""
    BROKEN = "broken"
    """A backward or a step was cut off. Its gradients stay until they are dropped."""
    CLOSED = "closed"
    """After ``close``."""


# BROKEN is reached from READY as well: a `loss.backward()` of the user fails after it ended, or a `with engine` block
# is left by an exception.
_TRANSITIONS = {
    Phase.READY: {Phase.BACKWARD, Phase.STEPPING, Phase.ASLEEP, Phase.BROKEN, Phase.CLOSED},
    Phase.ASLEEP: {Phase.READY, Phase.BROKEN, Phase.CLOSED},
    Phase.BACKWARD: {Phase.READY, Phase.BROKEN, Phase.CLOSED},
    Phase.STEPPING: {Phase.READY, Phase.BROKEN, Phase.CLOSED},
    Phase.BROKEN: {Phase.READY, Phase.CLOSED},
    Phase.CLOSED: {Phase.CLOSED},
}


class PhaseGuard:
    """Knows the phase, and refuses calls that make no sense in it. The errors say what to do instead."""

    def __init__(self, stepper: Stepper, counts: Accumulation) -> None:
        """``counts``: for the number of the present step in messages."""
        self.phase = Phase.READY
        self._is_destroyed = False
        self.has_backward = False
        """Whether there was a backward since the last ``engine.step()``."""
        self._part_loaded: Path | None = None
        self._cut_off = "backward"
        """Whether a backward or a step was cut off, for messages."""
        self._stepper = stepper
        self._counts = counts

    def move_to(self, phase: Phase) -> None:
        """Enter a phase."""
        if phase not in _TRANSITIONS[self.phase]:
            raise RuntimeError(f"the training loop cannot go from {self.phase.value} to {phase.value}")
        if phase is Phase.BROKEN:
            self._cut_off = "step" if self.phase is Phase.STEPPING else "backward"
        self.phase = phase
        self.has_backward |= phase is Phase.BACKWARD

    @property
    def has_gradients(self) -> bool:
        """Whether there may be gradients for a step: of a backward since the last one, or assigned."""
        return self.has_backward or self._stepper.gradients.has_any

    def on_backward(self) -> None:
        """There are gradients for a step."""
        self.has_backward = True

    def end_micro_batch(self) -> None:
        """A step has used the gradients."""
        self.has_backward = False

    def _order(self, call: str, problem: str, cure: str) -> StepError:
        return StepError.order(call, problem, cure=cure, step=self._counts.global_steps)

    def cut_off(self) -> None:
        """`reset`: a backward or step that runs is over."""
        self.has_backward = False
        if self.phase in (Phase.BACKWARD, Phase.STEPPING):
            self.move_to(Phase.BROKEN)

    @property
    def is_consistent(self) -> bool:
        """Whether all weights belong to one step of one training, and nothing was cut off."""
        return self.phase is Phase.READY and not self._stepper.is_between_steps and self._part_loaded is None

    def on_destroy(self) -> None:
        """``engine.destroy()`` was called, as libraries do."""
        self._is_destroyed = True

    def check_open(self) -> None:
        """Raise `EngineClosedError` after ``close()``."""
        if self.phase is Phase.CLOSED:
            raise EngineClosedError.after_close("this call", is_by_library=self._is_destroyed)

    def check_awake(self) -> None:
        """Raise after ``close()``, and while the engine is asleep."""
        self.check_open()
        if self.phase is Phase.ASLEEP:
            problem = "the engine is asleep, and its memory is released"
            raise self._order("this call", problem, "Call engine.wake() before it")

    def check_sleep(self) -> None:
        """Raise if ``engine.sleep()`` makes no sense now."""
        self.check_not_cut_off()
        self.check_consistent()
        if self.has_gradients:
            raise self._order(
                "engine.sleep()",
                "there are gradients of a step that has not ended, and they take memory",
                cure="Call engine.step() first, or engine.zero_grad() to drop them",
            )

    def on_partial_load(self, folder: Path | None) -> None:
        """A load of ``folder`` failed midway, so weights are of two trainings. None: weights are of one training
        again."""
        self._part_loaded = folder

    def check_loaded(self) -> None:
        """Raise `CheckpointError` if a load failed midway, so that weights are of two trainings."""
        if self._part_loaded is not None:
            raise CheckpointError(
                self._part_loaded, "loading it failed midway, so the weights are a mixture of two trainings"
            )

    def check_not_cut_off(self) -> None:
        """Raise if a load, or a backward or step whose gradients were not dropped, was cut off."""
        self.check_loaded()
        if self.phase is Phase.BROKEN:
            self.check_not_partial("it was cut off by an exception")
            raise self._order(
                "engine",
                f"the last {self._cut_off} was cut off by an exception, so its gradients are incomplete",
                cure="Call engine.reset() to drop them, then continue",
            )

    def check_step(self) -> None:
        """Raise if ``engine.step()`` makes no sense now."""
        self.check_not_cut_off()
        if not self.has_gradients:
            raise self._order(
                "engine.step()",
                "there was no backward since the last one",
                cure="Call engine.backward(loss) for each micro-batch before it",
            )

    def check_consistent(self) -> None:
        """Raise if weights are of two steps: units were updated in backward, and ``step`` was not called."""
        if self._stepper.is_between_steps:
            self.check_not_cut_off()  # else `engine.step()` is the cure
            raise self._order(
                "reading weights",
                "some of them were already updated in backward, and engine.step() has not been called",
                cure='Call engine.step() first, or set "infinity.update": "step"',
            )

    def check_not_partial(self, problem: str) -> None:
        """Raise if some units were updated in backward; ``problem`` says what happened then."""
        if self._stepper.updated:
            raise StepError.partial_update(
                step=self._counts.global_steps,
                num_updated=len(self._stepper.updated),
                num_units=len(self._stepper.units),
                problem=problem,
            )

    def check_backward(self, loss: Any) -> None:
        """Raise if ``engine.backward(loss)`` makes no sense now."""
        self.check_not_cut_off()
        if self._stepper.is_between_steps:
            raise self._order(
                "engine.backward()",
                "the weights were already updated in the backward before this one, and engine.step() was not called",
                cure='Call engine.step() after each gradient accumulation boundary, or set "infinity.update": "step"',
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self._order(
                "engine.backward()",
                f"the loss must be a scalar tensor, one with one element; got {what}",
                cure="Reduce it first, e.g. loss.mean()",
            )

    def check_optimizer_step(self, *, is_engine_step: bool) -> None:
        """Raise if the optimizer's step makes no sense now."""
        self.check_not_cut_off()
        if self._stepper.scaler.is_active and not is_engine_step:
            raise self._order(
                "optimizer.step()",
                "with fp16 the loss scale has to follow each step",
                cure="Call engine.step() with engine.backward(loss)",
            )
        if self._stepper.is_between_steps and not is_engine_step:
            raise self._order(
                "optimizer.step()",
                "the update already ran in engine.backward()",
                cure="Call engine.step() with engine.backward(), or optimizer.step() with loss.backward()",
            )
