"""What is different for the pager where several micro-batches, which take turns, share a step.

Knows at which moment of the step a unit is needed; must not know what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.activations.refusal import Refusal
from infinity.errors import ModelError
from infinity.loop.pager import Pager
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.vertical.interception import Interception
from infinity.vertical.microbatch import present


class SharedForward:
    """The `Sharing` of one vertical step.

    What one micro-batch writes into weights all others would see, and in backward it would be written once more. So it is
    undone, and the step refused.
    """

    def __init__(self, pager: Pager, interception: Interception) -> None:
        self._pager = pager
        self._interception = interception
        self._moment: int | None = 0
        self.first_moments: dict[int, int] = {}
        """Unit index -> the moment when the step's forward touched it first."""

    def begin_moment(self, moment: int | None) -> None:
        """What runs now, counted from the start of forward; None outside of forward."""
        self._moment = moment

    @contextmanager
    def in_between(self) -> Iterator[None]:
        """Some micro-batch's backward begins while others are in forward: inside the ``with`` block no forward is open."""
        moment, self._moment = self._moment, None
        try:
            with self._pager.as_if_inside(False):
                yield
        finally:
            self._moment = moment

    def defers(self, unit: Unit) -> bool:
        batch = present()
        return batch is not None and not batch.is_inside and self._interception.is_unit(unit)

    def note_touch(self, unit: Unit) -> bool:
        if self._moment is None:
            self._pager.residency.due.add(unit.index)
            return True
        self.first_moments.setdefault(unit.index, self._moment)
        return False

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        return True

    def is_urgent(self, unit: Unit) -> bool:
        return True

    def store_written(self, unit: Unit) -> None:
        raise Refusal(f"the model's forward writes to its parameter '{self.undo_writes(unit)}'")

    def undo_writes(self, unit: Unit) -> str | None:
        """Returns the name of a parameter to which anything was written."""
        unit.note_changes()
        if not unit.dirty:
            return None
        fqn = unit.layout.slots[min(unit.dirty)].spec.fqn
        stuck = self._pager.residency.forget_changes(unit)
        if stuck is not None:
            raise ModelError(
                f"the model's forward writes to its parameter '{stuck.spec.fqn}', which forbids taking micro-batches together, "
                "in a way that cannot be undone",
                cure="Set config key 'infinity.schedule' to \"ordinary\"",
                fqn=stuck.spec.fqn,
            )
        return fqn
