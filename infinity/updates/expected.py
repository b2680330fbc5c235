"""Optimizer state that is read before the gradients of its update are there.

Knows what was updated, in which order; must not know why it will be again.

[Note: before the gradients] A step mostly updates what the step before has, in the same order. So when gradients are soon to
come, and no job waits, records are read in that order. That is a guess, and never more: whoever opens a chunk gets what is
stored, and a page that he waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from infinity.tiers.state_store import StateStore
from infinity.units.layout import Chunk
from infinity.units.unit import Unit


class ExpectedUpdates:
    """Those of a step, by what the step before has updated. One thread at a time calls it, but for what says else."""

    def __init__(self, records: StateStore) -> None:
        self._records = records
        self.are_due = False
        """Whether it was announced, and `begin` has not been called since."""
        self._noted: dict[Unit, Sequence[Chunk]] = {}
        """What was updated since the last `begin`, in that order."""
        self._left: dict[Unit, deque[Chunk]] = {}
        """What was before, as far as it has been neither updated since nor read."""

    def announce(self) -> None:
        """Gradients are soon to come. From any thread."""
        self.are_due = True

    def note(self, unit: Unit, chunks: Sequence[Chunk]) -> None:
        """The update of these chunks begins."""
        self._left.pop(unit, None)
        self._noted[unit] = chunks

    def begin(self) -> None:
        """What was noted since the last time will be again."""
        self.are_due = False
        if self._noted:  # else the step between was skipped, and what was expected for it still is
            self._records.forget_ahead()
            self._left = {unit: deque(chunks) for unit, chunks in self._noted.items()}
            self._noted = {}

    def read(self) -> None:
        """Read what is expected next, as far as there is room."""
        while self._left:
            unit, chunks = next(iter(self._left.items()))
            while chunks:
                if not self._records.read_ahead(unit, chunks[0]):
                    return
                chunks.popleft()
            del self._left[unit]
