"""How the coordinator treats units in a vertical step, whose micro-batches take turns."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infinity.activations.unsupported import UnsupportedSchedule
from infinity.errors import ModelError
from infinity.paging.parameter_cache import ParameterCache
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class _CurrentMicroBatch(threading.local):
    micro_batch: Any = None
    """The `MicroBatch` whose thread this is; None in any other thread."""


present = _CurrentMicroBatch()


@dataclass(eq=False)
class VerticalForward:
    """Decides when a vertical step fetches units, and refuses writes to weights, as the `WeightWriter` of that step.

    If one micro-batch wrote to a weight, the others would see it, and the recomputation in backward would write again.
    So the write is undone, and the step runs in the ordinary order.
    """

    _parameter_cache: ParameterCache
    _of_blocks: Container[int]
    """Indices of the units of blocks."""
    # Two blocks: moments 0 (before block 1), 1 (block 1), 2 (between), 3 (block 2), 4 (behind it: head and loss).
    # Backward ends them in the order 4, 3, 2, 1, 0. A unit that forward touched first in moment 2 has all gradients
    # when 2 ends.
    _moment: int | None = 0
    first_moments: dict[int, int] = field(default_factory=dict)
    """Unit index -> the moment when the step's forward touched it first."""

    def begin_moment(self, moment: int | None) -> None:
        """Set the moment, counted from the start of forward; None: forward is over."""
        self._moment = moment

    @contextmanager
    def in_between(self) -> Iterator[None]:
        """Inside the ``with`` block a micro-batch's backward runs, while others are still in forward."""
        moment, self._moment = self._moment, None
        try:
            yield
        finally:
            self._moment = moment

    def defers(self, unit: Unit) -> bool:
        """Whether the hook of a called module must not fetch the unit, because other micro-batches have not arrived at
        it."""
        # Block 1 is called in micro-batch 0's thread: the hook must not fetch it. The step enters the unit when all
        # micro-batches wait at block 1, and `is_inside` is True while one of them computes it.
        batch = present.micro_batch
        return batch is not None and not batch.is_inside and unit.index in self._of_blocks

    def on_touch(self, unit: Unit) -> bool:
        """The unit is touched. Returns whether the step is in its backward. (It recomputes blocks outside of
        autograd's.)"""
        if self._moment is None:
            # Its update may be created as soon as this moment of backward ends, and needs the buffer.
            self._parameter_cache.due.add(unit.index)
            return True
        self.first_moments.setdefault(unit.index, self._moment)
        return False

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        # What was there before is always needed, to undo a write.
        return True

    def is_urgent(self, unit: Unit) -> bool:
        # At once: the next micro-batch would see it.
        return True

    def store_written(self, unit: Unit) -> None:
        raise UnsupportedSchedule(f"the model's forward writes to its parameter '{self.undo_writes(unit)}'")

    def undo_writes(self, unit: Unit) -> str | None:
        """Undo writes to the unit's weights, when the step is cut off. Returns a written parameter's FQN; None without
        one."""
        unit.detect_writes()
        if not unit.dirty:
            return None
        fqn = unit.layout.slots[min(unit.dirty)].spec.fqn
        stuck = self._parameter_cache.forget_changes(unit)
        if stuck is not None:
            raise ModelError(
                f"the model's forward writes to its parameter '{stuck.spec.fqn}', which forbids running "
                "micro-batches together, and the write cannot be undone",
                cure="Set config key 'infinity.schedule' to \"ordinary\"",
                fqn=stuck.spec.fqn,
            )
        return fqn
