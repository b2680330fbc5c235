"""Units that are held open for the user, who may write to them: what he changed is stored.

Knows units in memory; must not know how they came there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.stored_weights import StoredWeights
from infinity.numerics.raw_bytes import checksum
from infinity.units.unit import Unit


@dataclass
class Gathered:
    """A unit that is held open for the user, and what is needed to see what he changed."""

    unit: Unit
    checksums: dict[int, int] | None
    """Of each slot's weights before, where contents are compared; None: what torch has counted was changed."""
    kept: torch.Tensor | None
    """A copy of the trainable segment before, where it is needed."""


class GatheredUnits:
    """Notes what gathered units hold, and stores what is written to them."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def begin(self, unit: Unit, *, compares: bool) -> Gathered:
        """The unit is in memory, and is going to be held; see `StateAccess.gather`."""
        self.store_gathered(unit)  # by a block around this one: what it wrote so far is its own
        return Gathered(unit, _checksums(unit) if compares else None, self._kept(unit))

    def store_gathered(self, unit: Unit) -> None:
        """Store what was written to a gathered unit so far, and let main weights follow: it is about to be updated."""
        held = [gathered for gathered in unit.gathered if isinstance(gathered, Gathered)]
        if held:
            self._store_since(held[0])
            self.note_updated(unit)

    def note_updated(self, unit: Unit) -> None:
        """A gathered unit holds other weights than when it was gathered, and those are stored."""
        for gathered in unit.gathered:
            if isinstance(gathered, Gathered):
                gathered.kept = self._kept(unit)
                if gathered.checksums is not None:
                    gathered.checksums = _checksums(unit)
        unit.accept_changes()

    def _kept(self, unit: Unit) -> torch.Tensor | None:
        """A copy of what else nobody would know any more: half of the main weights, if it rests nowhere but here."""
        if (
            not self._stored.has_halves
            or not unit.stays_resident
            or unit.flat is None
            or not unit.layout.trainable_numel
        ):
            return None
        return unit.trainable_view(unit.flat.tensor()).clone()

    def scatter(self, gathering: Sequence[Gathered]) -> None:
        """The counterpart of `StateAccess.gather`: store what was changed."""
        with contextlib.ExitStack() as rest:
            for gathered in gathering:
                rest.callback(gathered.unit.let_go_of, gathered)
            for gathered in gathering:
                if gathered.unit.flat is None:
                    continue  # it went with the engine
                if self._store_since(gathered):
                    self.note_updated(gathered.unit)  # whoever else has gathered it
                gathered.unit.accept_changes()

    def _store_since(self, gathered: Gathered) -> bool:
        """Store what was written to a unit since its weights were noted; returns whether anything was."""
        unit = gathered.unit
        unit.note_changes()
        changed = set(unit.dirty)
        blocks = [gathered, *(each for each in unit.gathered if isinstance(each, Gathered))]
        before = next((each.checksums for each in blocks if each.checksums is not None), None)
        if before is not None:
            changed |= {index for index, now in _checksums(unit).items() if now != before[index]}
        if changed:
            self._stored.store_modified(unit, [unit.layout.slots[index] for index in sorted(changed)], gathered.kept)
        return bool(changed)


def _checksums(unit: Unit) -> dict[int, int]:
    return {slot.index: checksum(unit.bytes_of(slot)) for slot in unit.layout.slots}
