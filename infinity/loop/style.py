"""What kind of loop the user runs: who divides by the accumulation steps, and how many backwards a step has.

[Note: whose division] ``engine.backward(loss)`` divides the loss. A ``loss.backward()`` is only noticed by its
gradients, and the step shows what they are for: ``optimizer.step()`` of a plain loop uses them as they are,
``engine.step()`` divides them, as in DeepSpeed. So they are kept whole, and `divisor` says what the step divides them
by. If a step began with ``engine.backward``, its gradients are divided already, and later ones are divided as they
come. Gradients from another engine's ``engine.backward`` (a generator's, through the discriminator) were divided by
that engine.

[Note: backwards of a step] Some loops call ``engine.backward`` several times before ``engine.step`` (a GAN's
discriminator: real and fake). That shows only when the second one comes, and an update in the first one would have been
too early. So updates in backward begin after one step has shown that each micro-batch has one backward, and that nobody
reads gradients before it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import torch

from infinity.loop.accumulation import Accumulation
from infinity.torch_internals.names import is_autograds_thread

Key = TypeVar("Key")

logger = logging.getLogger(__name__)


class LoopStyle:
    """The rules of the module's notes. With 4 micro-batches, gradients g of one backward are stored and divided like
    this:

    first call of the step    engine.backward    loss.backward, engine.step    loss.backward, optimizer.step
    stored                    g / 4              g                             g
    divided in the step by    1                  4                             1
    """

    callers: Final[list[int]] = []
    """Threads inside ``engine.backward``, of any engine."""

    def __init__(self, counts: Accumulation) -> None:
        """``counts``: for the accumulation steps."""
        self._counts = counts
        self.divides = True
        """``scale_wrt_gas`` of the last ``engine.backward``: whether gradients are divided by the accumulation
        steps."""
        self.changes_what_comes = False
        """Whether gradients of the present step have been divided or multiplied on delivery."""
        # How the step's losses were divided by the accumulation steps: before backward, or not. Both False: none came yet.
        self._has_divided_losses = False
        self._has_whole_losses = False
        self._has_warned_of_rounding = False
        self._num_backwards = 0
        # None until the loop has shown which kind it is; then it stays.
        self._is_single: bool | None = None

    # ------------------------------------------------------------------------------------------------------ division

    def begin_backward(self, *, divides: bool) -> float:
        """``engine.backward`` was called. Returns the divisor of its loss."""
        self.divides = divides
        if self._has_whole_losses:  # what there is to divide, the step divides
            return 1.0
        self._has_divided_losses = True
        return self._counts.num_micro_batches if divides else 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Put around the run of ``engine.backward``."""
        me = threading.get_ident()
        # Of all engines: a hook of one engine has to know that its gradient comes from another one's divided loss.
        LoopStyle.callers.append(me)
        try:
            yield
        finally:
            LoopStyle.callers.remove(me)

    def scale_own(self, gradients: dict[Key, torch.Tensor]) -> Mapping[Key, torch.Tensor]:
        """Scale gradients of a ``loss.backward()`` of the user, so that they can be added to those of the step."""
        factor = float(self._counts.num_micro_batches if self.divides else 1)
        me = threading.get_ident()
        if me in LoopStyle.callers or (LoopStyle.callers and is_autograds_thread()):  # those serve all callers
            self._has_divided_losses |= not self._has_whole_losses
            # Divided by that engine already. Among whole gradients they are multiplied, since the step divides all.
            factor = 1 / factor if self._has_whole_losses else 1.0
        elif not self._has_divided_losses:
            self._has_whole_losses = True
            return gradients
        if factor == 1:
            return gradients
        self.changes_what_comes = True
        return {key: gradient / factor for key, gradient in gradients.items()}

    def divisor(self, *, is_engine_step: bool) -> int:
        """By what the step divides the accumulated gradients."""
        factor = self._counts.num_micro_batches if self._has_whole_losses and self.divides and is_engine_step else 1
        # Division by a power of two is exact, so sum / 4 has the bits of a sum of quarters.
        if factor & (factor - 1) and not self._has_warned_of_rounding:
            self._has_warned_of_rounding = True
            logger.warning(
                "loss.backward() with engine.step(): the sum of the gradients of %d micro-batches is divided at the "
                "end, so last bits may differ from dividing each loss. To divide each loss, call "
                "engine.backward(loss)",
                factor,
            )
        return factor

    def end_step(self) -> None:
        """The present step has no gradients any more."""
        self._has_divided_losses = self._has_whole_losses = self.changes_what_comes = False

    # ----------------------------------------------------------------------------------------- backwards of a micro-batch

    @property
    def updates_in_backward(self) -> bool:
        """Whether each micro-batch is known to have a single backward: see [Note: backwards of a step]."""
        return self._is_single is True

    def on_backward(self) -> None:
        """An ``engine.backward`` begins whose micro-batch may be the last of a step."""
        self._num_backwards += 1
        if self._num_backwards > 1:
            self._wait_for_step("several calls of engine.backward before engine.step")

    def on_engine_step(self, *, is_boundary: bool) -> None:
        """``engine.step`` was called. ``is_boundary``: at the end of a step."""
        if self._num_backwards == 1 and self._is_single is None and is_boundary:
            self._is_single = True
        self._num_backwards = 0

    def on_gradients_read(self) -> None:
        """The script reads accumulated gradients."""
        if self._has_divided_losses:
            self._wait_for_step("gradients are looked at before it")

    def on_plain_step(self) -> None:
        """The user called ``optimizer.step()``."""
        if self._num_backwards:
            self._wait_for_step("optimizer.step() is called instead")
        self._num_backwards = 0

    def _wait_for_step(self, reason: str) -> None:
        """Run no updates in backward from now on, unless a step has already shown one backward per micro-batch.

        See [Note: backwards of a step].
        """
        if self._is_single is None:
            self._is_single = False
            logger.info("updates run after engine.step(), not in backward: %s", reason)

    def forget_backwards(self) -> None:
        """The micro-batch's gradients were dropped."""
        self._num_backwards = 0
