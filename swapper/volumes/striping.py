"""The map from an address space to stripes on several drives, and the room of each for them.

[Note: zones]
Stripes are dealt in a short cycle. Each drive has turns in proportion to its speed, spread evenly, so that even a small
extent is on all drives. When a drive is full, a new zone begins with a cycle of the others:

    address   | 0 1 2 3 | 4 5 6 7 | 8 | 9 10 11
    drive     | A A B A | A A B A | A | B  B  B     (A is three times as fast as B, and then full)
              |<------- zone 0 ------>|<-zone 1->

In a zone, the place of a stripe follows from one division: see `_Zone`.

[Note: what stays]
No file records how the stripes of a durable run were dealt. It follows from the lengths of its files, if all drives
count as equally fast and none shares its space with another. Dealt again with exactly these lengths as limits, each
stripe comes to its old place. New stripes must not change that. So a drive that was full while others went on gets no
more stripes, even if it has space again. Example: A, B and C hold 4, 4 and 2 stripes. C was full after A B C A B C, and
the rest is A B A B. If C now took a stripe, lengths of 4, 4 and 3 would mean A B C A B C A B C A B, another order.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from swapper.errors import VolumeTooSmallError
from swapper.volumes.directory import Directory
from swapper.volumes.scratch_file import ScratchFile

MOST_TURNS = 32  # of the fastest drive in a cycle; ends the search in `deal` if no cycle reaches _GOOD_SHARE
_EQUAL_WITHIN = 0.25  # of a turn: added before turns are rounded down, since measured speeds are not exact
_GOOD_SHARE = 0.9  # of the sum of all bandwidths: `deal` takes the shortest cycle that reaches it


class _Zone(NamedTuple):
    """A part of the address space with one cycle.

    Attributes:
        first_stripe: The first stripe of the zone.
        columns: By turn of the cycle: the drive. A column is a drive's index, in this package's other files as well.
        turns: By turn: how many turns in a cycle that drive has.
        firsts: By turn: the stripe of the drive's file for this turn of the first cycle.
    """

    # Zone 0 of the picture: columns (A, A, B, A), turns (3, 3, 1, 3), firsts (0, 1, 0, 2). Stripe 7 is turn 3 of cycle
    # 1: on A, at stripe firsts[3] + 1 * turns[3] = 5 of its file.

    first_stripe: int
    columns: tuple[int, ...]
    turns: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, first_stripe: int, cycle: Sequence[int], used: Sequence[int]) -> _Zone:
        """The zone of a cycle; ``used``: stripes of each drive that earlier zones have."""
        turns = tuple(cycle.count(column) for column in cycle)
        firsts = tuple(used[column] + cycle[:turn].count(column) for turn, column in enumerate(cycle))
        return cls(first_stripe, tuple(cycle), turns, firsts)


class StripeMap:
    """The drive, and the place on it, of each address. See [Note: zones].

    Args:
        num_stripes: Length of the address space.
        stripe_bytes: Length of a stripe.
        speeds: Speed of each drive; only their ratios count.
        rooms: The most stripes that each drive may take.
        pools: By drive: the pool that its space comes from. Drives that share free space have the same one.
        pool_rooms: Stripes in each pool.

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
            # All whole cycles at once, then the rest turn by turn, up to the first drive without room for its next one.
            # So the time, and the number of zones, do not grow with the address space.
            num_cycles = min(
                (num_stripes - first_stripe) // len(cycle),
                *(rooms_left[column] // cycle.count(column) for column in cycle),
                *(pools_left[pool] // turns.count(pool) for pool in turns),
            )
            stop = first_stripe
            for num_turns in (num_cycles, 1):  # each turn of the cycle gets num_cycles stripes, then the rest one each
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
        """Return the used bytes of the file on the drive ``column``."""
        return self._used[column] * self.stripe_bytes

    def file_ranges(self, offset: int, num_bytes: int) -> list[tuple[int, int, int, int]]:
        """Return the places of bytes, stripe by stripe: drive, offset in its file, first and last + 1 of the bytes."""
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
    """Return, by drive, whether it was full when these numbers of stripes were dealt; see [Note: what stays]."""
    num_drives, num_stripes = len(num_held), sum(num_held)

    # Dealt again with room for everything on one drive: if the numbers differ, its room was what limited it.
    # [4, 4, 2]: with room on the third one, 10 stripes are dealt as 4, 3, 3. So it was full.
    def is_moved(column: int) -> bool:
        rooms = [*num_held[:column], num_stripes, *num_held[column + 1 :]]
        stripes = StripeMap(num_stripes, 1, [1.0] * num_drives, rooms, range(num_drives), rooms)
        return [stripes.file_bytes(each) for each in range(num_drives)] != list(num_held)

    return [is_moved(column) for column in range(num_drives)]


def deal(speeds: Sequence[float]) -> list[int]:
    """Return the order in which drives take turns: the shortest cycle that uses nearly all of their bandwidth.

    Speeds that differ by less than a quarter count as equal, where that uses nearly all of it. A drive so slow that the
    others would wait for it gets no turn; neither does one of speed 0.
    """
    # Speeds 3 and 1. One turn of the fastest: counts [1, 0], since int(1 / 3 + 0.25) = 0; 3 of 4 units of bandwidth.
    # Two: [2, 0]. Three: [3, 1], since int(3 / 3 + 0.25) = 1, and all 4 units. The cycle is [0, 0, 1, 0].
    fastest = max(speeds, default=0.0)
    best: list[int] = []
    best_share = 0.0
    for num_turns in range(1, MOST_TURNS + 1) if fastest else ():
        counts = [int(num_turns * speed / fastest + _EQUAL_WITHIN) for speed in speeds]
        seconds = max(count / speed for count, speed in zip(counts, speeds, strict=True) if speed)  # of one cycle
        share = sum(counts) / seconds / sum(speeds)  # of all bandwidth
        if share > best_share:
            best, best_share = counts, share
        if share >= _GOOD_SHARE:
            break
    # Each drive's turns are spread evenly over the cycle: [3, 1] gives A at 1/6, 3/6 and 5/6, and B at 1/2 behind A's.
    turns = sorted(((turn + 0.5) / count, column) for column, count in enumerate(best) for turn in range(count))
    return [column for _, column in turns]


class Space:
    """The number of stripes that each directory can give.

    Args:
        directories: As the user named them.
        files: Their files, in the same order.
        num_bytes: Size of the address space; a multiple of ``stripe_bytes``.
        stripe_bytes: Length of a stripe.
        is_named: The files are those of a durable run: see [Note: what stays].
        stays: The files hold a run that is resumed, so each stripe keeps its place.

    Raises:
        VolumeTooSmallError: They have too little together.
    """

    def __init__(
        self,
        directories: Sequence[Directory],
        files: Sequence[ScratchFile],
        num_bytes: int,
        stripe_bytes: int,
        is_named: bool,
        stays: bool,
    ) -> None:
        self._drives = drives = [file.drive for file in files]
        self._num_stripes = num_bytes // stripe_bytes
        self._stripe_bytes = stripe_bytes
        # Directories of one file system share its free space: a pool. A file system of 0 bytes has no limit (ramfs).
        # Example: a and b are on one file system with 10 free stripes, c on another with 7.
        #   _pools = [0, 0, 1], _pool_rooms = [10, 7], and with capacity_bytes of 3 stripes for b: _rooms = [10, 3, 7]
        # Together they give min(10 + 3, 10) + min(7, 7) = 17 stripes: see _check.
        free = {d.device_number: d.free_bytes // stripe_bytes if d.total_bytes else self._num_stripes for d in drives}
        self._pools = [list(free).index(drive.device_number) for drive in drives]
        self._pool_rooms = list(free.values())
        self._held = [0 for _ in drives]  # stripes that must stay in each file
        is_full = [False for _ in drives]
        if is_named:
            # Each file is a pool of its own here, with an equal part of the free space: where a stripe is must follow
            # from the lengths of the files alone.
            own = [file.num_bytes // stripe_bytes for file in files]
            sharing = Counter(self._pools)
            self._pool_rooms = [
                stripes + self._pool_rooms[pool] // sharing[pool]
                for stripes, pool in zip(own, self._pools, strict=True)
            ]
            self._pools = list(range(len(drives)))
            if stays:
                # A drive that was full before the others gets no stripe more, although it may have space again.
                self._held, is_full = own, were_full(own)
        self._rooms: list[int] = []
        self._limits: list[str] = []
        for column, directory in enumerate(directories):  # column: index of a drive, in all lists here
            room, limit = self._pool_rooms[self._pools[column]], "free"
            if is_full[column]:
                room, limit = self._held[column], "was full before"
            if directory.capacity_bytes is not None and directory.capacity_bytes // stripe_bytes < room:
                room, limit = directory.capacity_bytes // stripe_bytes, "its capacity_bytes"
            self._rooms.append(room)
            self._limits.append(limit)
        self._check()

    def lessen(self, column: int, num_bytes: int, reason: str) -> None:
        """Lower what the directory of this index can give, after a reservation that failed.

        Raises:
            VolumeTooSmallError: Now they have too little together.
        """
        # At least one stripe less, so that the caller's loop ends; but never less than what must stay.
        self._rooms[column] = max(self._held[column], min(num_bytes // self._stripe_bytes, self._rooms[column] - 1))
        self._limits[column] = reason
        self._check()

    def share_out(self, speeds: Sequence[float]) -> StripeMap:
        """Return the map from addresses to drives, for these speeds."""
        return StripeMap(self._num_stripes, self._stripe_bytes, speeds, self._rooms, self._pools, self._pool_rooms)

    def _check(self) -> None:
        in_pools = [0 for _ in self._pool_rooms]
        for pool, room in zip(self._pools, self._rooms, strict=True):
            in_pools[pool] += room
        num_stripes = sum(map(min, in_pools, self._pool_rooms))
        if num_stripes >= self._num_stripes:
            return
        capacities = []
        for column, drive in enumerate(self._drives):
            first = self._drives[self._pools.index(self._pools[column])]
            shared = "" if first is drive else f", shared with {str(first.path)!r}"
            capacities.append((drive.path, self._rooms[column] * self._stripe_bytes, self._limits[column] + shared))
        least = min(range(len(capacities)), key=lambda column: capacities[column][1])
        raise VolumeTooSmallError(
            self._drives[least].path,
            self._num_stripes * self._stripe_bytes,
            num_stripes * self._stripe_bytes,
            f"in stripes of {self._stripe_bytes}",
            capacities,
        )
