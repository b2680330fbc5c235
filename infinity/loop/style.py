"""What the user's loop shows of itself: who divides by the accumulation steps, and how many backwards make a step.

Knows numbers only; must not know gradients or units.

[Note: whose division] ``engine.backward(loss)`` divides the loss. A ``loss.backward()`` of the user cannot be seen before
its gradients come, and what they are for shows only at the step: ``optimizer.step()`` is the plain loop's, and takes them
as they are; ``engine.step()`` is DeepSpeed's, which divides them. So they are kept whole, and `divisor` says what the step
has to divide them by. A step that has begun with ``engine.backward`` holds parts already: what comes to them is divided as
it comes. What comes to an engine from another one's ``engine.backward`` (a generator's, through the discriminator) has been
divided by that.

[Note: backwards of a step] Some loops call ``engine.backward`` several times before ``engine.step`` (the discriminator
of a GAN: real and fake), which shows when the second one comes. An update in the first one would be too early then, so
updates in backward begin when a first step has shown that each of its micro-batches has one backward, and that nobody looks at
gradients before it.
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
    """See the module's notes."""

    callers: Final[list[int]] = []
    """The threads of calls of ``engine.backward``, of whatever engine, that have not returned."""

    def __init__(self, counts: Accumulation) -> None:
        """``counts``: know the accumulation steps."""
        self._counts = counts
        self.divides = True
        """Whether the accumulation steps divide gradients at all: what the last ``engine.backward`` was told."""
        self.changes_what_comes = False
        """Whether gradients of the present step have been divided, or multiplied, as they came."""
        self._has_parts = False
        self._is_whole = False
        self._has_warned = False
        self._num_backwards = 0
        self._is_single: bool | None = None

    # ------------------------------------------------------------------------------------------------------ division

    def begin_backward(self, *, divides: bool) -> float:
        """``engine.backward`` was called. Returns what its loss is to be divided by."""
        self.divides = divides
        if self._is_whole:  # what there is to divide, the step divides
            return 1.0
        self._has_parts = True
        return self._counts.num_micro_batches if divides else 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside it, ``engine.backward`` runs."""
        me = threading.get_ident()
        LoopStyle.callers.append(me)
        try:
            yield
        finally:
            LoopStyle.callers.remove(me)

    def scale_own(self, gradients: dict[Key, torch.Tensor]) -> Mapping[Key, torch.Tensor]:
        """Gradients of a backward of the user's own, as they are to be added to those of the step."""
        factor = float(self._counts.num_micro_batches if self.divides else 1)
        me = threading.get_ident()
        if me in LoopStyle.callers or (LoopStyle.callers and is_autograds_thread()):  # those serve all callers
            self._has_parts |= not self._is_whole
            factor = 1 / factor if self._is_whole else 1.0
        elif not self._has_parts:
            self._is_whole = True
            return gradients
        if factor == 1:
            return gradients
        self.changes_what_comes = True
        return {key: gradient / factor for key, gradient in gradients.items()}

    def divisor(self, *, is_engine_step: bool) -> int:
        """What the gradients that are there have to be divided by in the step."""
        factor = self._counts.num_micro_batches if self._is_whole and self.divides and is_engine_step else 1
        if factor & (factor - 1) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "loss.backward() with engine.step(): the sum of %d micro-batches' gradients is divided, which may differ "
                "in the last bit from dividing each loss; engine.backward(loss) divides the loss",
                factor,
            )
        return factor

    def end_step(self) -> None:
        """The gradients of the present step are gone."""
        self._has_parts = self._is_whole = self.changes_what_comes = False

    # ----------------------------------------------------------------------------------------- backwards of a micro-batch

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward may be taken for the only one of its micro-batch."""
        return self._is_single is True

    def on_backward(self) -> None:
        """An ``engine.backward`` begins whose micro-batch may be the last of a step."""
        self._num_backwards += 1
        if self._num_backwards > 1:
            self._wait_for_step("several calls of engine.backward before engine.step")

    def on_engine_step(self, *, is_boundary: bool) -> None:
        """``engine.step``, at the end of a step or of another micro-batch."""
        if self._num_backwards == 1 and self._is_single is None and is_boundary:
            self._is_single = True
        self._num_backwards = 0

    def on_gradients_read(self) -> None:
        """Somebody looks at gradients that are there."""
        if self._has_parts:
            self._wait_for_step("gradients are looked at before it")

    def on_plain_step(self) -> None:
        """``optimizer.step()``, called by the user."""
        if self._num_backwards:
            self._wait_for_step("optimizer.step() is called instead")
        self._num_backwards = 0

    def _wait_for_step(self, reason: str) -> None:
        """From now on, no update runs in backward; unless the loop has shown that it has one backward per micro-batch."""
        if self._is_single is None:
            self._is_single = False
            logger.info("updates run after engine.step(), not in backward: %s", reason)

    def forget_backwards(self) -> None:
        """The micro-batch's gradients were dropped."""
        self._num_backwards = 0
