"""Who hears what becomes of gradients. See [How the engine hears of things] in ``infinity.paging.listener``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.units.layout import Slot
from infinity.units.unit import Unit


class GradientListener:
    """Whoever has given gradients to the user, and keeps those as he knows them. This one has not."""

    def note_graph(self, unit: Unit, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient of autograd's has a graph of its own. It is going to be delivered without."""

    def note_delivery(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Gradients of a micro-batch are about to be added to those that are there."""

    def note_end(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """The main gradients of these parameters are about to be replaced or dropped."""
