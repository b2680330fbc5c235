"""Where each byte of an address space lies when it is dealt to several drives in stripes.

[Note: zones]
Stripes are dealt in a short cycle in which every drive has as many turns as its speed is worth, spread evenly, so that
even a small extent lies on all drives. When a drive is full, a new zone begins, in which the others go on:

    address   | 0 1 2 3 | 4 5 6 7 | 8 | 9 10 11
    drive     | A A B A | A A B A | A | B  B  B     (A is three times as fast as B, and then full)
              |<------- zone 0 ------>|<-zone 1->

In a zone, the place of a stripe follows from one division.

[Note: what stays]
How the stripes of files that outlive a process were dealt is written nowhere: it follows from their lengths, if all drives
count as equally fast and none shares its room with another. Dealt again with rooms of just these lengths, each stripe comes to
where it is. What is dealt behind them must leave that so: a drive that others went on without gets nothing more, though it
may have room again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

MOST_TURNS = 32
"""Of a drive in a cycle."""
_EQUAL_WITHIN = 0.1
_GOOD_SHARE = 0.9


class _Zone(NamedTuple):
    """How the stripes of one part of the address space are dealt.

    Attributes:
        first_stripe: Its first one.
        columns: By turn of a cycle: which drive it goes to.
        turns: How many turns of a cycle that drive has.
        firsts: In which stripe of the drive's file this turn of the first cycle lies.
    """

    first_stripe: int
    columns: tuple[int, ...]
    turns: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, first_stripe: int, cycle: Sequence[int], used: Sequence[int]) -> _Zone:
        """The zone of a cycle, from where so many stripes of each drive are used."""
        turns = tuple(cycle.count(column) for column in cycle)
        firsts = tuple(used[column] + cycle[:turn].count(column) for turn, column in enumerate(cycle))
        return cls(first_stripe, tuple(cycle), turns, firsts)


class StripeMap:
    """Knows which drive and which place on it belong to an address; must not know files. See [Note: zones].

    Args:
        num_stripes: Length of the address space.
        stripe_bytes: Length of a stripe.
        speeds: How fast each drive is; only their ratios count.
        rooms: So many stripes each drive may take.
        pools: For each drive, which pool its space comes from: drives that share their free space have the same one.
        pool_rooms: So many stripes there are in each pool.

    Raises:
        ValueError: All drives together have too little room.
    """

    def __init__(
        self,
        num_stripes: int,
        stripe_bytes: int,
        speeds: Sequence[float],
        rooms: Sequence[int],
        pools: Sequence[int],
        pool_rooms: Sequence[int],
    ) -> None:
        self.stripe_bytes = stripe_bytes
        self._used = [0] * len(speeds)
        self._zones: list[_Zone] = []
        self.first_cycle: list[int] = []
        rooms_left, pools_left = list(rooms), list(pool_rooms)
        first_stripe = 0
        while first_stripe < num_stripes:
            cycle = deal([speed * (rooms_left[i] > 0 < pools_left[pools[i]]) for i, speed in enumerate(speeds)])
            if not cycle:
                raise ValueError(f"room for {first_stripe} stripes, {num_stripes} are needed")
            self.first_cycle = self.first_cycle or cycle
            firsts = list(self._used)
            turns = [pools[column] for column in cycle]
            # Whole cycles at one go, the rest turn by turn up to the first drive that has no room for its next one.
            num_cycles = min(
                (num_stripes - first_stripe) // len(cycle),
                *(rooms_left[column] // cycle.count(column) for column in cycle),
                *(pools_left[pool] // turns.count(pool) for pool in turns),
            )
            stop = first_stripe
            for num_turns in (num_cycles, 1):
                for column in cycle:
                    if stop + num_turns > num_stripes or min(rooms_left[column], pools_left[pools[column]]) < num_turns:
                        break
                    rooms_left[column] -= num_turns
                    pools_left[pools[column]] -= num_turns
                    self._used[column] += num_turns
                    stop += num_turns
            self._zones.append(_Zone.of(first_stripe, cycle, firsts))
            first_stripe = stop
        self._starts = [zone.first_stripe for zone in self._zones]

    def file_bytes(self, column: int) -> int:
        """Return how much of a drive is used."""
        return self._used[column] * self.stripe_bytes

    def locate(self, offset: int) -> tuple[int, int]:
        """Return the drive of a byte of the address space, and the offset in that drive's file."""
        ((column, file_offset, _, _),) = self.file_ranges(offset, 1)
        return column, file_offset

    def file_ranges(self, offset: int, num_bytes: int) -> list[tuple[int, int, int, int]]:
        """Return where bytes of the address space lie, stripe by stripe: the drive, the offset in its file, and which of the
        bytes these are, from where to where."""
        zones, stripe_bytes, found = self._zones, self.stripe_bytes, []
        stripe, within = divmod(offset, stripe_bytes)
        low = 0
        while low < num_bytes:
            zone = zones[0] if len(zones) == 1 else zones[bisect.bisect_right(self._starts, stripe) - 1]
            cycle, turn = divmod(stripe - zone.first_stripe, len(zone.columns))
            high = min(low + stripe_bytes - within, num_bytes)
            file_offset = (zone.firsts[turn] + cycle * zone.turns[turn]) * stripe_bytes + within
            found.append((zone.columns[turn], file_offset, low, high))
            stripe, within, low = stripe + 1, 0, high
        return found


def were_full(num_held: Sequence[int]) -> list[bool]:
    """Return which drives others went on without when so many stripes were dealt to each; see [Note: what stays]."""
    num_drives, num_stripes = len(num_held), sum(num_held)

    def is_moved(column: int) -> bool:
        rooms = [*num_held[:column], num_stripes, *num_held[column + 1 :]]
        stripes = StripeMap(num_stripes, 1, [1.0] * num_drives, rooms, range(num_drives), rooms)
        return [stripes.file_bytes(each) for each in range(num_drives)] != list(num_held)

    return [is_moved(column) for column in range(num_drives)]


def deal(speeds: Sequence[float]) -> list[int]:
    """Return the order in which drives take turns: the shortest cycle that uses nearly all of their bandwidth.

    Speeds that differ by less than a tenth count as equal. A drive that is so slow that the others would wait for it has
    no turn at all; neither has one of speed 0.
    """
    fastest = max(speeds, default=0.0)
    best: list[int] = []
    best_share = 0.0
    for num_turns in range(1, MOST_TURNS + 1) if fastest else ():
        counts = [int(num_turns * speed / fastest + _EQUAL_WITHIN) for speed in speeds]
        seconds = max(count / speed for count, speed in zip(counts, speeds, strict=True) if speed)
        share = sum(counts) / seconds / sum(speeds)
        if share > best_share:
            best, best_share = counts, share
        if share >= _GOOD_SHARE:
            break
    # Each drive's turns are spread evenly over the cycle.
    turns = sorted(((turn + 0.5) / count, column) for column, count in enumerate(best) for turn in range(count))
    return [column for _, column in turns]
