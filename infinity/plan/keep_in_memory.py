"""Selects what stays in host memory, so that a step does not read or write it. Pure arithmetic.

In order of I/O bytes saved per byte of memory: weights (2 bytes per parameter save 6 in a step of one micro-batch: two
reads and a write), then gradients, then states (2 per byte). Each kind takes what fits, in a fixed order, so more
memory never saves less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
    """Ranges [start, stop) of `by_size` that stay in memory."""
    scratch_bytes: int
    """For gradients that are spilled: they are summed here before they are written."""
    num_bytes: int
    """Gradients in memory, and the scratch."""
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
    """Units in the order in which their weights are kept: most saved per byte first, then the largest.

    Equal units are spread evenly over the model. Routed experts come last, as not every micro-batch needs them.
    """

    def gain(index: int) -> tuple[bool, float, int]:
        # Without the size of this rank's shard: sizes differ between ranks, and all of them must choose the same order.
        unit = replace(units[index], weight_shard_bytes=None)
        return unit.is_routed, -request.saved_by_weights(unit) / max(unit.weight_bytes, 1), -unit.weight_bytes

    return sorted(spread(len(units)), key=gain)


def select_weights(sizes: Sequence[int], order: Sequence[int], room_bytes: int) -> tuple[list[int], int]:
    """The units that fit into ``room_bytes``, tried in ``order``, and the room that is left; ``sizes``: bytes by
    unit."""
    # First fit: a unit that is too large is skipped, and smaller ones behind it are still tried.
    taken: list[int] = []
    for index in order:
        if sizes[index] <= room_bytes:
            taken.append(index)
            room_bytes -= sizes[index]
    return taken, room_bytes


def select_gradients(units: Sequence[UnitSize], request: Request, capacity_bytes: int) -> Iterator[GradientPlacement]:
    """Yield sensible ways to use ``capacity_bytes`` for main gradients."""
    # Gradients that are spilled need a scratch as large as the largest of them. So one choice is made for each size of
    # a unit: that is the largest spilled one, all larger units stay in memory, and of the others as many as fit.
    # Worked example, one byte per element: units of 8, 4, 2 and 1, capacity 12.
    #   largest spilled 8: scratch 8, of the room of 4 the unit of 4 takes all. In memory: 4
    #   largest spilled 4: scratch 4, the unit of 8 stays, no room is left.     In memory: 8, which is better
    #   largest spilled 2: scratch 2 + 8 + 4 is too much
    numels = {index: unit.trainable_numel for index, unit in enumerate(units) if unit.trainable_numel}
    itemsize, scratch_itemsize = request.gradient_itemsize, request.scratch_itemsize
    moved = 2 * request.gradient_moves * itemsize  # bytes per element that a spilled gradient moves: written and read
    by_size = sorted(numels, key=lambda index: -numels[index])
    rising = [-numels[index] for index in by_size]
    sums = [0, *accumulate(numels[index] for index in by_size)]
    total = sums[-1]
    # Ranks that divide states exchange one spilled unit while the next one is summed: see `infinity.gradients.reducer`.
    # They use two scratches if there is room.
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
            # First fit by binary search, as there may be thousands of units: jump to the first unit that fits, and take
            # the longest run from there. A run leaves less than half of the room, so there are few runs.
            while (place := bisect_left(rising, -room, place)) < len(rising):
                stop = bisect_right(sums, sums[place] + room) - 1
                runs.append((place, stop))
                taken = sums[stop] - sums[place]
                place, room, kept = stop, room - taken, kept + taken
            yield GradientPlacement(by_size, tuple(runs), scratch_bytes, scratch_bytes + kept * itemsize, moved * kept)
        if itemsize < scratch_itemsize:
            # bf16 gradients in memory may have to become fp32 sums, which needs a scratch for any unit, also the
            # largest.
            break


def most_gradients(choices: Iterable[GradientPlacement]) -> GradientPlacement:
    """The choice that saves most bytes. Among equals: more units, then one without spilling, then the least memory."""
    return max(choices, key=lambda each: (each.saved_bytes, each.num_units, each.scratch_bytes == 0, -each.num_bytes))


def select_states(units: Sequence[UnitSize], request: Request, room_bytes: int) -> tuple[tuple[int, ...], int]:
    """For each unit, the number of elements whose state stays in memory, and the room that is left."""
    # The same share of every unit, so that the drives' work is spread evenly over a step. Worked example: two units of
    # 4 granules that cost 1 each, room 5. Both get 4 * 5 // 8 = 2, and the granule that is left goes to the first: 3
    # and 2.
    # An optimizer that updates whole parameters has one chunk per unit, which is one granule.
    sizes = [max(unit.state_numel, 1) if request.updates_whole_parameters else CHUNK_GRANULE for unit in units]
    granules = [unit.state_numel // size for unit, size in zip(units, sizes, strict=True)]
    costs = list(map(request.record_format.record_bytes, sizes, (unit.num_states for unit in units)))
    total = sum(number * cost for number, cost in zip(granules, costs, strict=True))
    if room_bytes >= total:
        return tuple(unit.state_numel for unit in units), room_bytes - total
    kept = [number * room_bytes // total for number in granules]
    room_bytes -= sum(number * cost for number, cost in zip(kept, costs, strict=True))
    for index in spread(len(units)):
        if kept[index] < granules[index] and costs[index] <= room_bytes:
            kept[index] += 1
            room_bytes -= costs[index]
    return tuple(number * size for number, size in zip(kept, sizes, strict=True)), room_bytes
