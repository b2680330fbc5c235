"""Which rank keeps the optimizer state of which elements, and updates those: a shard of every unit.

Pure arithmetic: knows layouts and numbers of ranks; must not know processes, files or what an update is.

    trainable segment of a unit, 4 ranks (elements); cuts lie at multiples of CHUNK_GRANULE
    |     place 0     |     place 1     |     place 2     |     place 3     |
    rank r has the place (r + index of the unit) modulo the number of ranks: so what cannot be divided evenly goes around

A shard follows from the model, its units and the number of ranks alone, never from budgets or drives: all ranks know those
of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity.units.layout import CHUNK_GRANULE, SEGMENT_GRANULE_BYTES, SLOT_GRANULE, Slot
from infinity.units.unit import Unit

NUM_SERVED = 3
"""Shards of weights that are kept in memory at a time for other ranks."""


@dataclass(frozen=True)
class Shards:
    """The shards of ``num`` ranks, of which this process is ``index``. With one rank, or none that share, it has all."""

    index: int = 0
    num: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether there are several shards."""
        return self.num > 1

    def span(self, unit: Unit, rank: int | None = None) -> tuple[int, int]:
        """Elements [start, stop) of the unit's trainable segment, padding included. They may be none.

        Args:
            unit: whose.
            rank: whose shard; None: that of this process.
        """
        return self._part(unit, unit.layout.trainable_numel, CHUNK_GRANULE, rank)

    def weight_spans(self, unit: Unit, rank: int | None = None) -> list[tuple[int, int]]:
        """Bytes [start, stop) of the unit's flat buffer that a rank keeps where weights are divided, too, in order.

        Of the trainable segment, those of `span`; of each frozen one as large a part. Without any, the list is empty. The
        ranks together have each byte once, and all numbers are multiples of SEGMENT_GRANULE_BYTES.

        Args:
            unit: whose.
            rank: whose shard; None: that of this process.
        """
        found = []
        for segment in unit.layout.segments:
            granule = CHUNK_GRANULE * segment.dtype.itemsize if segment.is_trainable else SEGMENT_GRANULE_BYTES
            start, stop = self._part(unit, segment.num_bytes, granule, rank)
            if start < stop:
                found.append((segment.start_bytes + start, segment.start_bytes + stop))
        return found

    def _part(self, unit: Unit, total: int, granule: int, rank: int | None) -> tuple[int, int]:
        place = ((self.index if rank is None else rank) + unit.index) % self.num
        granules = total // granule
        return granules * place // self.num * granule, granules * (place + 1) // self.num * granule

    def spans(self, unit: Unit) -> list[tuple[int, int]]:
        """The shard of each rank, as `span` gives it."""
        return [self.span(unit, rank) for rank in range(self.num)]

    def parts_of_parameter(self, unit: Unit, slot: Slot) -> list[tuple[int, int]]:
        """Of each rank, the elements [start, stop) of one trainable parameter of which it keeps main weight and states.

        They count in the order in which the parameter lies in memory (C order for ordinary ones). Without any, start is stop.
        All ranks together have each element once. What a parameter keeps once (its step count) all ranks keep.
        """
        clips = (clipped(span, slot.start, slot.stop) for span in self.spans(unit))
        return [(start - slot.start, stop - slot.start) for start, stop in clips]


def clipped(span: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    """What of a span lies in [start, stop); where nothing does, both ends are ``start``."""
    low, high = max(span[0], start), min(span[1], stop)
    return (low, high) if low < high else (start, start)


def runs_of(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """The elements [start, stop) of a unit in which the parameters lie; what lies side by side is one run."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.start):
        if runs and slot.start - runs[-1][1] < SLOT_GRANULE:  # nothing but padding lies between
            runs[-1] = runs[-1][0], slot.stop
        else:
            runs.append((slot.start, slot.stop))
    return runs
