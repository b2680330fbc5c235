"""Weights of resident units while the engine sleeps: copies from which these units can be fetched."""

from __future__ import annotations

import torch

from infinity.tiers.user_copies import PutAside
from infinity.units.unit import Arrival, SimpleArrival, Unit


class AsideWeights:
    """The copies, by unit."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit.index in self._kept

    def keep(self, unit: Unit, put_aside: PutAside) -> bool:
        """Copy what lies in the unit's flat buffer, unless that was done; whether there is a copy now."""
        if unit not in self:
            kept = put_aside(unit.memory)
            if kept is None:
                return False
            self._kept[unit.index] = kept
        return True

    def fetch(self, unit: Unit) -> Arrival:
        """Bring the weights into the unit's flat buffer."""
        unit.memory.copy_(self._kept[unit.index])
        return SimpleArrival(lambda: None)

    def forget(self, unit: Unit) -> None:
        """The flat buffer is the only place of the weights again."""
        self._kept.pop(unit.index, None)
