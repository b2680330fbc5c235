"""What stays in host memory, so that it is never read or written: weights, gradients, optimizer state.

Pure arithmetic on sizes. By I/O bytes saved per byte of memory: weights first (a unit's 2 bytes per parameter save 6 in a
step of one micro-batch), then gradients, then states (2 per byte). Each kind takes what fits, in a fixed order: so more
memory never saves less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from infinity.plan.sizes import Request, UnitSize, has_shards, spread
from infinity.units.layout import CHUNK_GRANULE


@dataclass(frozen=True)
class GradientPlacement:
    """Which main gradients stay in memory, and the scratch for spilling the others."""

    by_size: Sequence[int]
    """All units with gradients, the largest first."""
    runs: tuple[tuple[int, int], ...]
    """Of `by_size`, those in memory: from, to."""
    scratch_bytes: int
    num_bytes: int
    """Those in memory and the scratch."""
    saved_bytes: int

    @property
    def num_units(self) -> int:
        """How many stay in memory."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def units(self) -> tuple[int, ...]:
        """Which stay in memory."""
        return tuple(sorted(index for start, stop in self.runs for index in self.by_size[start:stop]))


def order_of_weights(units: Sequence[UnitSize], request: Request) -> list[int]:
    """Units in the order in which their weights are kept: most saved per byte, then the largest; equals spread evenly.

    Experts that are used now and then come last.

    Ranks that divide weights have shards of different sizes, and one order: what counts is what all of them save.
    """

    def gain(index: int) -> tuple[bool, float, int]:
        unit = replace(units[index], weight_shard_bytes=None)
        return unit.is_routed, -request.saved_by_weights(unit) / max(unit.weight_bytes, 1), -unit.weight_bytes

    return sorted(spread(len(units)), key=gain)


def select_weights(sizes: Sequence[int], order: Sequence[int], room_bytes: int) -> tuple[list[int], int]:
    """The units of ``order`` whose weights fit into the room, one after the other, and the room that is left.

    ``sizes``: of each unit, bytes of weights that would stay.
    """
    taken: list[int] = []
    for index in order:
        if sizes[index] <= room_bytes:
            taken.append(index)
            room_bytes -= sizes[index]
    return taken, room_bytes


def select_gradients(units: Sequence[UnitSize], request: Request, capacity_bytes: int) -> Iterator[GradientPlacement]:
    """All sensible ways to use ``capacity_bytes`` for main gradients."""
    numels = {index: unit.trainable_numel for index, unit in enumerate(units) if unit.trainable_numel}
    itemsize, scratch_itemsize = request.gradient_itemsize, request.scratch_itemsize
    moved = 2 * request.gradient_moves * itemsize
    by_size = sorted(numels, key=lambda index: -numels[index])
    rising = [-numels[index] for index in by_size]
    sums = [0, *accumulate(numels[index] for index in by_size)]
    total = sums[-1]
    # Ranks that divide states exchange one of the others while the next one comes: see `infinity.gradients.reducer`.
    is_divided = has_shards(units)
    if total * scratch_itemsize <= capacity_bytes:
        yield GradientPlacement(by_size, ((0, len(by_size)),), 0, total * scratch_itemsize, moved * total)
    for largest in sorted(set(numels.values()), reverse=True):
        scratch_bytes = largest * scratch_itemsize
        if is_divided and 2 * scratch_bytes <= capacity_bytes:
            scratch_bytes *= 2
        place = bisect_left(rising, -largest)
        room = (capacity_bytes - scratch_bytes) // itemsize - sums[place]
        if room >= 0:
            runs, kept = [(0, place)], sums[place]
            # Of the others what fits, one after the other. What a run leaves is less than half of what it found.
            while (place := bisect_left(rising, -room, place)) < len(rising):
                stop = bisect_right(sums, sums[place] + room) - 1
                runs.append((place, stop))
                taken = sums[stop] - sums[place]
                place, room, kept = stop, room - taken, kept + taken
            yield GradientPlacement(by_size, tuple(runs), scratch_bytes, scratch_bytes + kept * itemsize, moved * kept)
        if itemsize < scratch_itemsize:
            break  # any of them may turn out to be a sum, and need the scratch


def most_gradients(choices: Iterator[GradientPlacement]) -> GradientPlacement:
    """The placement that keeps most; if there are several, one that never has to spill, or else takes the least memory."""
    return max(
        choices,
        key=lambda chosen: (chosen.saved_bytes, chosen.num_units, chosen.scratch_bytes == 0, -chosen.num_bytes),
    )


def select_states(units: Sequence[UnitSize], request: Request, room_bytes: int) -> tuple[tuple[int, ...], int]:
    """For each unit, of how many elements the optimizer state stays in memory: the same share of each. And the room left.

    So the drives' work is spread evenly over a step.
    """
    if request.updates_whole_parameters:
        return _select_whole_states(units, request, room_bytes)
    granules = [unit.state_numel // CHUNK_GRANULE for unit in units]
    costs = [request.record_format.record_bytes(CHUNK_GRANULE, unit.num_states) for unit in units]
    total = sum(number * cost for number, cost in zip(granules, costs, strict=True))
    if room_bytes >= total:
        return tuple(unit.state_numel for unit in units), room_bytes - total
    kept = [number * room_bytes // total for number in granules]
    room_bytes -= sum(number * cost for number, cost in zip(kept, costs, strict=True))
    for index in spread(len(units)):
        if kept[index] < granules[index] and costs[index] <= room_bytes:
            kept[index] += 1
            room_bytes -= costs[index]
    return tuple(number * CHUNK_GRANULE for number in kept), room_bytes


def _select_whole_states(units: Sequence[UnitSize], request: Request, room_bytes: int) -> tuple[tuple[int, ...], int]:
    kept = [0] * len(units)
    for index in spread(len(units)):
        cost = request.record_bytes(units[index])
        if cost <= room_bytes:
            kept[index] = units[index].state_numel
            room_bytes -= cost
    return tuple(kept), room_bytes
