"""A pager whose forward is shared by several micro-batches, which take turns.

Knows whose turn it is and at which moment of the step; must not know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from infinity.activations.refusal import Refusal
from infinity.errors import UnsupportedModelError
from infinity.paging.pager import Pager
from infinity.threads.turn import in_backward
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class SharedPager(Pager):
    """`Pager`, with one forward phase for all micro-batches of a step.

    Without `open_step` it is an ordinary pager.
    """

    is_shared = False
    """Whether a step is open."""
    _moment: int | None = None
    """What runs now, counted from the start of forward; None outside of forward."""
    first_moments: dict[int, int]
    """Unit index -> the moment when the step's forward touched it first."""

    _defers: Callable[[Unit], bool] | None = None

    def _is_deferred(self, unit: Unit) -> bool:
        return self._defers is not None and self._defers(unit)

    @property
    def is_in_forward(self) -> bool:
        # One micro-batch's call of the model does not cut off another's.
        return super().is_in_forward and not self.is_shared

    def open_step(self, is_deferred: Callable[[Unit], bool]) -> None:
        """All micro-batches begin their forward.

        Args:
            is_deferred: whether a unit must not be fetched now though its module is called: all have to arrive first.
        """
        self.begin_forward(is_root=False)  # no module's
        for unit in self.units:  # what was written before the step stays
            self.store_changes(unit)
        self.is_shared = True
        self.first_moments = {}
        self._defers = is_deferred

    def begin_moment(self, moment: int) -> None:
        """What runs now, counted from the start of forward."""
        self._moment = moment

    def close_forward(self) -> None:
        """All micro-batches have ended their forward."""
        self._moment = None
        self.end_forward()

    def close_step(self) -> None:
        """The step is over, or was cut off."""
        self.is_shared = False
        self._moment = None
        self._defers = None
        self.due.clear()

    def abandon_forward(self) -> None:
        self.turn.be_alone()
        if self.is_shared:
            for unit in self.units:
                unit.forget_uses()
                unit.unbind()
                self._take_back(unit)
        self.close_step()
        super().abandon_forward()

    # What one micro-batch writes into weights all others would see, and in backward it would be written once more.

    def remember(self, unit: Unit, slot: Slot) -> None:
        if self.is_shared and unit.flat is not None and slot.index not in unit.before | dict.fromkeys(unit.dirty):
            unit.keep_before(slot)
        super().remember(unit, slot)

    def settle_changes(self, unit: Unit) -> None:
        if self.is_shared and unit.num_active == 0 and (fqn := self._take_back(unit)) is not None:
            raise Refusal(f"the model's forward writes to its parameter '{fqn}'")
        super().settle_changes(unit)

    def store_changes(self, unit: Unit) -> None:
        if self.is_shared and (fqn := self._take_back(unit)) is not None:
            raise Refusal(f"the model's forward writes to its parameter '{fqn}'")
        super().store_changes(unit)

    def _take_back(self, unit: Unit) -> str | None:
        """Undo what was written into the unit's weights. Returns the name of a parameter to which anything was."""
        unit.note_changes()
        if not unit.dirty:
            return None
        fqn = unit.layout.slots[min(unit.dirty)].spec.fqn
        stuck = self.forget_changes(unit)
        if stuck is not None:
            raise UnsupportedModelError(
                f"the model's forward writes to its parameter '{stuck.spec.fqn}', which forbids taking micro-batches together, "
                "in a way that cannot be undone",
                cure="Set config key 'infinity.schedule' to \"ordinary\"",
                fqn=stuck.spec.fqn,
            )
        return fqn

    @contextmanager
    def in_between(self) -> Iterator[None]:
        """Some micro-batch's backward begins while others are in forward: inside the ``with`` block no forward is open."""
        depth, self._depth = self._depth, 0
        moment, self._moment = self._moment, None
        try:
            yield
        finally:
            self._depth, self._moment = depth, moment

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A unit is computed once more, outside of autograd's backward."""
        self._depth += 1
        try:
            with torch.enable_grad(), self.saving:
                yield
        finally:
            self._depth -= 1

    def enter(self, unit: Unit) -> None:
        if not self._is_deferred(unit):
            super().enter(unit)

    def leave(self, unit: Unit) -> None:
        if not self._is_deferred(unit):
            super().leave(unit)

    def touch(self, unit: Unit, *, is_saved: bool = False) -> None:
        if self.turn.is_guest:
            super().touch(unit, is_saved=is_saved)
            return
        self.check_touch(unit)
        if self._moment is not None:
            self.first_moments.setdefault(unit.index, self._moment)
        elif self.is_shared:
            self.due.add(unit.index)
            if not in_backward():
                self._listener().note_backward_use(unit, is_saved=is_saved)
        super().touch(unit, is_saved=is_saved)
