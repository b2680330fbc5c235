"""Which rank keeps the optimizer state of which elements, and updates them: a shard of every unit. Pure arithmetic.

    trainable segment of a unit, 4 ranks (elements); cuts lie at multiples of CHUNK_GRANULE
    |     place 0     |     place 1     |     place 2     |     place 3     |
    rank r has the place (r + index of the unit) modulo the number of ranks

A shard depends on the model, its units and the number of ranks only, and never on budgets or drives. So each rank can
compute the shards of all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity.units.layout import CHUNK_GRANULE, SEGMENT_GRANULE_BYTES, SLOT_GRANULE, Slot
from infinity.units.unit import Unit


@dataclass(frozen=True)
class Shards:
    """The shards of ``num`` ranks, of which this process is rank ``index``. A single rank has everything."""

    index: int = 0
    num: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether there are several shards."""
        return self.num > 1

    def span(self, unit: Unit, rank: int | None = None) -> tuple[int, int]:
        """Elements [start, stop) of the unit's trainable segment, padding included. The span may be empty.

        ``rank``: whose shard; None: that of this process.
        """
        return self._part(unit, unit.layout.trainable_numel, CHUNK_GRANULE, rank)

    def weight_spans(self, unit: Unit) -> list[tuple[int, int]]:
        """Bytes [start, stop) of the unit's flat buffer that this process keeps in stage 3, in order; may be empty."""
        return [part for of_ranks in self.weight_parts(unit) if (part := of_ranks[self.index])[0] < part[1]]

    def weight_parts(self, unit: Unit) -> list[list[tuple[int, int]]]:
        """Return for each segment of the flat buffer the bytes [start, stop) that each rank keeps in stage 3.

        In the trainable segment these are the elements of `span`; a frozen segment is divided equally. The ranks
        together have each byte once. All numbers are multiples of SEGMENT_GRANULE_BYTES.
        """
        found = []
        for segment in unit.layout.segments:
            granule = CHUNK_GRANULE * segment.dtype.itemsize if segment.is_trainable else SEGMENT_GRANULE_BYTES
            parts = [self._part(unit, segment.num_bytes, granule, rank) for rank in range(self.num)]
            found.append([(segment.start_bytes + start, segment.start_bytes + stop) for start, stop in parts])
        return found

    def _part(self, unit: Unit, total: int, granule: int, rank: int | None) -> tuple[int, int]:
        # Worked example: 7 granules, 3 ranks. Place 0 has granules [0, 2), place 1 [2, 4), place 2 [4, 7). The place
        # moves by one with each unit, so that the larger shard is not always that of the same rank. In unit 1, rank 1
        # has place 2.
        place = ((self.index if rank is None else rank) + unit.index) % self.num
        granules = total // granule
        return granules * place // self.num * granule, granules * (place + 1) // self.num * granule

    def spans(self, unit: Unit) -> list[tuple[int, int]]:
        """The shard of each rank, as `span` gives it."""
        return [self.span(unit, rank) for rank in range(self.num)]

    def parts(self, unit: Unit, start: int, stop: int) -> list[tuple[int, int]]:
        """What the shard of each rank has of the elements [start, stop) of the segment."""
        return [clipped(span, start, stop) for span in self.spans(unit)]

    def parts_of_parameter(self, unit: Unit, slot: Slot) -> list[tuple[int, int]]:
        """For each rank, the elements [start, stop) of a trainable parameter whose main weight and states it keeps.

        Elements are counted in memory order (C order for a contiguous parameter). An empty part has start == stop. All
        ranks together have each element once. All of them keep a state that exists once per parameter, such as its step
        count.
        """
        return [(start - slot.start, stop - slot.start) for start, stop in self.parts(unit, slot.start, slot.stop)]


def clipped(span: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    """The intersection of a span with [start, stop); if that is empty, (start, start)."""
    low, high = max(span[0], start), min(span[1], stop)
    return (low, high) if low < high else (start, start)


def runs_of(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """The elements [start, stop) that these parameters occupy in the segment; adjacent ones are merged into one run."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.start):
        # A gap below SLOT_GRANULE is padding. With quantized states (slots at multiples of 256) some gaps are longer:
        # then there are more runs than needed, which is correct as well.
        if runs and slot.start - runs[-1][1] < SLOT_GRANULE:
            runs[-1] = runs[-1][0], slot.stop
        else:
            runs.append((slot.start, slot.stop))
    return runs
