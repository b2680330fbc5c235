"""What paging asks of others, where there is more than one of a kind."""

from __future__ import annotations

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
