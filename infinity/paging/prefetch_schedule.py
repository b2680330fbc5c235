"""The order in which units are needed, and what to fetch next.

[Note: prefetch schedule]
Weights have to be on their way before they are needed, but what a model will call next is known to its forward alone. Most
models do in each micro-batch what they did in the last. So the units that are touched are recorded, and the record is the
forecast of the next micro-batch: a circle, with a cursor on the unit in use. To be in memory is what comes next on it, each
unit once, as much as there is room for (`wanted`). Four units of 10 bytes, room for 20:

    forecast        0    1    2    3  |  3    2    1    0  | 0 ...      | forward ends, `backward_start` is 4
    wanted         01   12   23   32  | 32   21   10   01  |
    fetched              2    3       |       1    0       |            one touch before it is needed
    released             0    1       |       3    2       |            of those not wanted, what is needed last

So 4 of 8 touches read. What backward begins with, forward has left in memory, and the next forward finds what backward ended
with. ``simulate`` tells the same without a model; with that, a plan predicts the bytes of a step.
  * A schedule is a hint and never a contract. A model that goes another way costs reads that somebody waits for, nothing else.
    If 1 is left out, a touch of 2 is found a place ahead, and the cursor goes there. What is nowhere in the next 32 places
    leaves the cursor where it is: else one weight that is used out of order would throw the forecast away.
  * Touches of the unit in use count once, but 3 is recorded twice, at the end of forward and at the beginning of backward:
    so ``backward_start`` is a place of its own. When backward begins, the cursor goes there, even if forward ended early.
  * Only what ended normally becomes the forecast (`commit`), and evaluation has a schedule of its own.
  * The first forecast is a guess, from the order of registration.
Experts are other ones each time, and each layer's are a run of units in the record. The router says which they are a moment
before they are needed, and then they take the place of those of the last time (`PrefetchSchedule.route`), in forward and in
backward. Until then the run is forecast as far as it is certain: by the experts that the last four micro-batches had all used.
Behind those, room is left for as many bytes as the last micro-batch needed: what is fetched into it would make room for the
experts and be read again. What was used least often in the last 32 makes room first. With 0 a layer, e1 to e9 its experts, -
the room that is left:

    recorded    0   e1 e4     5  | 5   e4 e1     0     and e4 was used in all of the last four
    forecast    0   e4 -      5  | 5   e4 -      0     from the beginning of the next micro-batch on
    routed      0   e2 e4     5  | 5   e4 e2     0     as soon as the router of layer 0 has chosen e2 and e4

What is wanted for the next micro-batch follows from the forecast and not from what is routed.

A window that slides along remembers nothing. In evaluation, 0 1 2 3 in a circle, one with room for 3 units reads all 4 each
time, as would letting the longest unused go. One with room for 2, and one unit that stays, reads 3. So which units stay is
decided beforehand, by ``infinity.plan.placement`` (``staying`` here), and the window gets what it takes to be in time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

_RESYNC_WINDOW = 32
"""How far ahead a unit may lie and still count as 'some layers were skipped'; beyond it the cursor stays where it is."""


_HISTORY = (1 << 32) - 1
_CERTAIN = 0b1111
"""The last four micro-batches."""


class PrefetchSchedule:
    """Records the units touched in one micro-batch and replays the last record as a cyclic forecast."""

    def __init__(self, guess: Sequence[int], groups: Mapping[int, int] | None = None) -> None:
        """
        Args:
            guess: the first forecast.
            groups: unit of an expert -> a number for the experts of its layer.
        """
        self._groups = groups or {}
        self._history = dict.fromkeys(self._groups, 0)
        """Unit of an expert -> a bit for each of the last 32 micro-batches, the last one lowest: whether it was used."""
        self._routed: dict[int, set[int]] = {}
        """Number of a layer -> its experts that this micro-batch uses."""
        self._recomputes = False
        """Whether routers decided anew in the last backward: layers are computed once more there."""
        self.order: tuple[int, ...] = tuple(unit for unit in guess if unit not in self._groups)
        """The forecast: unit indices in the order of need, one cycle. A layer whose experts are not known yet has an entry
        -1 - (number of the layer), behind its certain experts."""
        self._next = self.order
        """The forecast of the next micro-batch; with experts it differs from that of the present one."""
        self._usual: dict[int, list[int]] = {}
        """-1 - (number of a layer) -> the experts that the last micro-batch used, without the certain ones."""
        self.backward_start = 0
        """Position in ``order`` of the first unit that backward needs."""
        self.record: tuple[tuple[int, ...], int] = tuple(guess), 0
        """Units of the last micro-batch that ended normally, experts included, and the position at which backward began."""
        self._position = 0
        self._recorded: list[int] = []
        self._recorded_backward_start: int | None = None
        self.num_commits = 0
        """How often the forecast has begun anew."""
        self._placed: tuple[int, ...] | None = None
        """The forecast that `next_use` has indexed."""
        self.present = -1
        """The unit in use: another `touch` of it changes nothing. -1: the next `touch` does work in any case."""

    @property
    def has_backward(self) -> bool:
        """Whether the present record contains a backward."""
        return self._recorded_backward_start is not None

    @property
    def place(self) -> tuple[tuple[int, ...], int]:
        """The forecast, and the position in it."""
        return self.order, self._position

    def forward_order(self, num_units: int) -> list[int]:
        """All units in the order in which the recorded forward needed them. Those that it did not need come last."""
        first = dict.fromkeys(index for index in self.order[: self.backward_start] if index >= 0)
        return [*first, *(index for index in range(num_units) if index not in first)]

    def begin(self) -> None:
        """A new micro-batch begins; the record of the one before, if complete, becomes the forecast."""
        self._recorded = []
        self._recorded_backward_start = None
        self._position = 0
        self.present = -1
        self._routed.clear()

    def begin_backward(self) -> None:
        """Backward begins: the forecast continues at the place where the recorded backward began."""
        if self._recorded_backward_start is None:
            self._recorded_backward_start = len(self._recorded)
            self.present = -1
            if self._groups and not self.num_commits:  # the first forecast is a guess without experts
                self.order = (*self._recorded, *reversed(self._recorded))
                self.backward_start = len(self._recorded)
            if self.order:
                self._position = self.backward_start % len(self.order)

    def commit(self) -> None:
        """The micro-batch ended normally: replay it from now on, if it needed anything."""
        recorded = tuple(self._recorded)
        self.num_commits += 1
        if recorded:
            start = self._recorded_backward_start
            self.record = self.order, self.backward_start = recorded, len(recorded) if start is None else start
            if self._groups:
                self._forget_experts()
        # What comes next is the beginning of the next micro-batch.
        self._position = 0

    def _forget_experts(self) -> None:
        """Keep only those experts in the forecast that are certain to be used again."""
        for unit, group in self._groups.items():
            if group in self._routed:
                self._history[unit] = (self._history[unit] << 1 | (unit in self._routed[group])) & _HISTORY
        for group, used in self._routed.items():
            self._usual[-1 - group] = [unit for unit in used if not self._is_certain(unit)]
        self._routed.clear()  # a record may be committed twice
        order: list[int] = []
        start = self.backward_start
        last: int | None = None
        for place, unit in enumerate((*self.order, -1)):  # one more, for a run at the end
            layer = self._groups.get(unit)
            if last is not None and (layer != last or place == start):
                order.append(-1 - last)
            if place == start:
                self.backward_start = len(order)
            if place < len(self.order) and (layer is None or self._is_certain(unit)):
                order.append(unit)
            last = layer
        self.order = self._next = tuple(order)

    def _is_certain(self, unit: int) -> bool:
        """Whether the last four micro-batches have all used an expert."""
        return self._history[unit] & _CERTAIN == _CERTAIN

    def route(self, group: int, units: Sequence[int]) -> None:
        """The router of a layer has chosen: these units of its experts are needed next, in this order."""
        in_backward = self._recorded_backward_start is not None
        again = (*units, *reversed(units))
        self._recomputes |= in_backward
        self._routed.setdefault(group, set()).update(units)
        place = self._position + (1 if self.order else 0)
        self._replace(place, group, again if in_backward else units)
        # In forward, the layer's place in backward is filled, too: there, -1 - group stands for its experts. Searched
        # from the end: backward begins with the last of several calls of a layer.
        backward = self.order[self.backward_start :][::-1]
        if not in_backward and -1 - group in backward:
            place = len(self.order) - 1 - backward.index(-1 - group)
            # Its certain experts come before that entry: the run begins with the first of them.
            while place > self.backward_start and self._groups.get(self.order[place - 1]) == group:
                place -= 1
            self._replace(place, group, again if self._recomputes else again[len(units) :])

    def _replace(self, place: int, group: int, units: Sequence[int]) -> None:
        """The run of a layer's experts that begins there, if one does, is this from now on."""
        order, end = self.order, place
        while end < len(order) and self._groups.get(order[end]) == group:
            end += 1
        if end < len(order) and order[end] == -1 - group:
            end += 1
        self.order = (*order[:place], *units, *order[end:])
        if place < self.backward_start:
            self.backward_start += len(self.order) - len(order)

    def touch(self, unit: int) -> bool:
        """``unit`` is needed now. Returns whether this moved the forecast (False while the same unit is still in use)."""
        if unit == self.present:
            return False
        self._recorded.append(unit)
        self.present = unit
        order, position = self.order, self._position
        for ahead in range(min(len(order), _RESYNC_WINDOW)):
            if order[(position + ahead) % len(order)] == unit:
                self._position = (position + ahead) % len(order)
                break
        return True

    def next_use(self, unit: int) -> int:
        """In how many places the unit is needed; more than there are places if it is nowhere, the less often it was used."""
        places = self._places_now().get(unit)
        if places is None:
            return (len(self.order) + 1) * (1 + 32 - self._history.get(unit, 0).bit_count())
        found = bisect_left(places, self._position)
        return (places[found] if found < len(places) else places[0] + len(self.order)) - self._position

    def _places_now(self) -> dict[int, list[int]]:
        """Unit -> its places in the forecast."""
        if self._placed is not self.order:  # it is another one than the last time
            self._placed = self.order
            self._places: dict[int, list[int]] = {}
            for place, each in enumerate(self.order):
                self._places.setdefault(each, []).append(place)
        return self._places

    def is_forecast(self, unit: int) -> bool:
        """Whether the forecast names the unit."""
        return unit in self._places_now()

    def is_routed(self, unit: int) -> bool:
        """Whether this micro-batch uses an expert."""
        return unit in self._routed.get(self._groups[unit], ())

    def wanted(
        self, num_bytes: Sequence[int], capacity_bytes: int, staying: Collection[int] = (), *, is_around: bool = True
    ) -> tuple[list[int], bool]:
        """The units to hold: from the one in use on the next ones in the order of need, as many as fit into
        ``capacity_bytes``; and whether these are all.

        Args:
            num_bytes: of each unit.
            capacity_bytes: for all of them.
            staying: units that are always there, in memory of their own.
            is_around: whether those of the next micro-batch follow.
        """
        order = self.order[self._position :]
        if is_around:
            order += self._next if self._groups else self.order[: self._position]
        found: dict[int, None] = {}
        used, is_all = 0, True
        # No further than there is room: this is asked with every touch of a unit, of which there may be thousands.
        for unit in order:
            if unit in found or unit in staying:
                continue
            used += num_bytes[unit] if unit >= 0 else sum(num_bytes[each] for each in self._usual.get(unit, ()))
            if used > capacity_bytes:
                is_all = False
                break
            found[unit] = None
        return [unit for unit in found if unit >= 0], is_all


@dataclass(frozen=True)
class Simulation:
    """What the coordinator does in the steady state."""

    fetches: list[tuple[int, int]]
    """(position in the cycles, unit) of each fetch, where positions count from 0 over all cycles."""
    held: frozenset[int]
    """The units that are in memory when the last cycle has ended."""


def simulate(
    order: Sequence[int],
    num_bytes: Sequence[int],
    capacity_bytes: int,
    *,
    prefetches: bool,
    num_cycles: int = 1,
    staying: Collection[int] = (),
    lasting_until: int | None = None,
) -> Simulation:
    """What the coordinator does in ``num_cycles`` runs through ``order``, in the steady state.

    Args:
        order, num_bytes, capacity_bytes: the units in the order of need, their sizes, and what those in memory may take.
        prefetches: whether units are fetched ahead of need.
        num_cycles: how often.
        staying: units that never leave, in memory besides ``capacity_bytes``.
        lasting_until: if fetched units do not outlast these runs: the place in ``order`` from which on nothing is fetched
            for the next run.
    """
    length = len(order)
    persistent = frozenset(staying)
    window = _Window(order, num_bytes, capacity_bytes, persistent)
    fetches: list[tuple[int, int]] = []
    begun_with: set[int] | None = None
    per_cycle: list[tuple[int, int]] = []
    for cycle in range(num_cycles + 1):  # one more, to warm up
        begin = cycle * length
        if cycle == 1 and lasting_until is not None:  # the runs begin with nothing in memory
            window = _Window(order, num_bytes, capacity_bytes, persistent, begin)
        if cycle < 2 or begun_with != window.held:  # else the cycle before comes once more
            begun_with = set(window.held)
            per_cycle = []
            for place in range(length):
                ends = lasting_until is not None and place >= lasting_until
                until = begin + (length if ends else place + length) if prefetches else begin + place + 1
                per_cycle += [(place, unit) for unit in window.move(begin + place, until)]
        if cycle:
            fetches += [(begin - length + place, unit) for place, unit in per_cycle]
    return Simulation(fetches, frozenset(window.held | persistent))


@dataclass(eq=False)
class _Window:
    """The places from the one in use on whose units fit, and the units in memory. Places count from 0 over all cycles."""

    _order: Sequence[int]
    _num_bytes: Sequence[int]
    _capacity_bytes: int
    _persistent: frozenset[int]
    _begin: int = 0

    def __post_init__(self) -> None:
        self.held: set[int] = set()
        self._end = self._begin
        self._num_uses: dict[int, int] = {}  # within the window, of each unit that is in it
        self._wanted_bytes = self._held_bytes = 0
        self._leaving: list[tuple[int, int]] = []  # heap of (-next use, unit) of those held outside the window
        last: dict[int, int] = {}
        self._next_use = [0] * len(self._order)
        for place in reversed(range(2 * len(self._order))):
            if place < len(self._order):
                self._next_use[place] = last[self._order[place]] - place
            last[self._order[place % len(self._order)]] = place

    def move(self, place: int, until: int) -> list[int]:
        """``place`` is in use, and nothing from ``until`` on is wanted. Returns the units that are fetched.

        The window slides on, and its end goes back once a run at most. So the number of moves grows with that of places.
        """
        while self._begin < place:
            passed = self._begin
            self._begin += 1
            self._drop(passed, passed + self._next_use[passed % len(self._order)])
        # At `lasting_until` of `simulate`, where what was wanted for the next run is given up.
        while self._end > until:
            self._end -= 1
            self._drop(self._end, self._end)
        fetched: list[int] = []
        while self._end < until:
            unit = self._order[self._end % len(self._order)]
            if unit in self._num_uses:
                self._num_uses[unit] += 1
            elif unit not in self._persistent:
                size = self._num_bytes[unit]
                if (
                    self._wanted_bytes + size > self._capacity_bytes and self._end > place
                ):  # what is in use comes anyhow
                    break
                self._num_uses[unit] = 1
                self._wanted_bytes += size
                if unit not in self.held:
                    fetched.append(unit)
            self._end += 1
        for unit in fetched:
            self._hold(unit)
        return fetched

    def _drop(self, place: int, next_use: int) -> None:
        """``place`` is no longer in the window."""
        unit = self._order[place % len(self._order)]
        if unit in self._persistent:
            return
        self._num_uses[unit] -= 1
        if not self._num_uses[unit]:
            del self._num_uses[unit]
            self._wanted_bytes -= self._num_bytes[unit]
            heappush(self._leaving, (-next_use, unit))

    def _hold(self, unit: int) -> None:
        """Add a unit; evict units outside the window for it, the one that is needed last first."""
        size = self._num_bytes[unit]
        while self._held_bytes + size > self._capacity_bytes and self._leaving:
            victim = heappop(self._leaving)[1]
            if victim in self.held and victim not in self._num_uses:
                self.held.remove(victim)
                self._held_bytes -= self._num_bytes[victim]
        self.held.add(unit)
        self._held_bytes += size
