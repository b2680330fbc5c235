"""What others than the engine write into weights goes where those rest, and main weights follow.

Knows which slots of a unit are dirty; must not know how that was noticed.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.checkpoint.state_access import StateAccess
from infinity.errors import ModelError
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class WrittenWeights:
    """The `WeightWriter` of an engine."""

    def __init__(self, access: StateAccess, before_writes: Callable[[], None]) -> None:
        """``before_writes``: as in `infinity.updates.stepper.Stepper`."""
        self._access = access
        self._before_writes = before_writes

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether only what the weights were before a write tells which elements it changed. See `Unit.before`."""
        return self._access.has_halves and unit.stays_resident and slot.spec.is_trainable

    def is_urgent(self, unit: Unit) -> bool:
        """Whether main weights follow, or other ranks write, too: neither must depend on when the unit is paged out."""
        if self._access.divides(unit):
            return True
        return self._access.has_main_weights and any(unit.layout.slots[i].spec.is_trainable for i in unit.dirty)

    def store_written(self, unit: Unit) -> None:
        """Store the weights in ``unit.dirty`` from the unit's flat buffer, and let main weights follow.

        It may be cut off anywhere and called again: what has been stored already is the same the second time.

        Raises:
            ModelError: nobody knows which elements were changed, so which main weights keep their low bits.
        """
        changed = [unit.layout.slots[index] for index in sorted(unit.dirty)]
        unknown = [slot for slot in changed if self.needs_before(unit, slot) and slot.index not in unit.before]
        if unknown:
            unit.forget_written(slot.index for slot in unknown)
            raise ModelError(
                f"parameter '{unknown[0].spec.fqn}' was written to in forward in a way that is seen too late to tell which of "
                "its fp32 main weights follow",
                cure="Write to it by its own methods or by .data (p.mul_(...), p.data.copy_(...)), or set config key "
                "'infinity.main_weights' to \"fp32\"",
                fqn=unknown[0].spec.fqn,
            )
        self._before_writes()
        before = None
        if unit.before and unit.flat is not None and unit.layout.trainable is not None:
            copy = unit.flat.tensor().clone()
            for index, values in unit.before.items():
                unit.view(copy, unit.layout.slots[index]).copy_(values)
            before = unit.trainable_view(copy)
        self._access.store_modified(unit, changed, before, is_outdating=False)
        unit.forget_changes()
