"""Whom the pager tells what it sees.

## How the engine hears of things

Calls go down: the engine calls loop and stepper, and these the pager. What is noticed below (an access, a hook of a module or
of autograd) is told upwards through one listener per direction, which the lower part gets when it is made:

| who tells | whom | what |
|---|---|---|
| `Pager` | `PagerListener`: ``engine.listener`` | forward, reads, uses and backward begin or end |
| `Pager` | `Sharing`: ``vertical.shared_forward`` | units are needed in a step that micro-batches share |
| `Residency` | `WeightWriter`: ``checkpoint.state_access`` | weights were written to by others than the engine |
| collector, ``MainGradStore``, ``Backwards`` | ``GradientListener``: ``loop.grad_access`` | gradients come, change, go |
| ``ParameterHandler`` | ``GradientHost``: ``loop.grad_access``; ``Gatherer``: ``engine.settled_access`` | gradients, weights |

What is above is made last. So a listener is given as a function that returns the one there is by now, see ``engine.parts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.units.layout import Slot
from infinity.units.unit import Unit


class Activations(Protocol):
    """Where what autograd saves may wait for backward."""

    def pack(self, tensor: torch.Tensor) -> SavedElsewhere | None:
        """Take it, or None: it is to stay as it is."""

    def close(self) -> None:
        """Let go of everything."""


class SavedElsewhere(Protocol):
    """What `Activations` gives for a tensor."""

    def load(self) -> torch.Tensor:
        """The tensor again."""


class PagerListener:
    """Whoever follows what happens to the model. This one does not."""

    def check_usable(self) -> None:
        """Something begins: raises what went wrong in the background, or that the engine is closed."""

    def check_settled(self) -> None:
        """Weights are about to be read outside forward and backward: raises if they are between two steps."""

    def begin_call(self) -> None:
        """The model itself is about to be called, and none of its modules is inside its forward."""

    def begin_forward(self) -> None:
        """A forward phase begins."""

    def note_use(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """A training forward uses parameters: their own module is called, or an operation gets them."""

    def note_parts(self, unit: Unit, *, by_script: bool) -> None:
        """Weights are used outside of the modules that enter their unit."""

    def note_backward_use(self, unit: Unit, *, is_saved: bool) -> None:
        """Backward uses a unit's weights. ``is_saved``: forward had saved them for that."""

    def end_backward(self) -> None:
        """A backward has ended that `Pager.note_backward` has noticed. Must not raise."""

    def pause(self) -> None:
        """Between two pieces of a step: another unit is needed or updated, or another micro-batch has its turn."""


class WeightWriter(Protocol):
    """Stores what others than the engine write into weights."""

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether what the weights were before a write can be found nowhere else, and is needed to store them."""

    def is_urgent(self, unit: Unit) -> bool:
        """Whether what has been written has to be stored before anything else is written to the unit."""

    def store_written(self, unit: Unit) -> None:
        """Store the slots in ``unit.dirty`` from the unit's flat buffer."""


class Sharing(WeightWriter, Protocol):
    """How the micro-batches of a step share one forward and one backward. It stands for the writer meanwhile."""

    def defers(self, unit: Unit) -> bool:
        """Whether the unit must not be fetched now though its module is called: all micro-batches have to arrive first."""

    def note_touch(self, unit: Unit) -> bool:
        """The unit is needed now. Returns whether the step is in its backward, which is not always autograd's."""

    def undo_writes(self, unit: Unit) -> object:
        """The step is cut off: what was written into the unit's weights is undone."""
