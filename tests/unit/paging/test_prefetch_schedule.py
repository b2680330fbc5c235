"""The forecast: recorded, replayed, and found again after the model took another path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.device.compute import Fence, FlatBuffer
from infinity.paging.prefetch_schedule import PrefetchSchedule, simulate
from tests.unit.stage import TensorSource, frozen_unit, make_parameter_cache

_EXPERTS = {10: 0, 11: 0, 12: 0, 13: 0, 20: 1, 21: 1, 22: 1, 23: 1}
"""Two layers, 0 and 1, whose experts are units."""


def _upcoming(schedule: PrefetchSchedule, *, is_around: bool = True) -> list[int]:
    """All units in the order of need."""
    return schedule.wanted([0] * 256, 0, is_around=is_around)[0]


def _go(schedule: PrefetchSchedule, *events: Any) -> PrefetchSchedule:
    """Numbers are units that are touched, pairs what a router has chosen for a layer, and names are calls.

    A list is what has to come next, and a dict that with room for so many units.
    """
    for event in events:
        if isinstance(event, int):
            schedule.touch(event)
        elif isinstance(event, tuple):
            schedule.route(*event)
        elif isinstance(event, list):
            assert _upcoming(schedule) == event
        elif isinstance(event, dict):
            assert {number: schedule.wanted([1] * 24, number)[0] for number in event} == event
        else:
            getattr(schedule, event)()
    return schedule


def _micro_batch(*routed: list[int], recomputes: bool = False) -> list[Any]:
    """Unit 0 and the experts of layer 0, unit 1 and those of layer 1; and back."""
    layers = [(layer, (layer, experts), *experts) for layer, experts in enumerate(routed)]
    events = ["begin", *(event for layer in layers for event in layer), "begin_backward"]
    for layer, experts in reversed(list(enumerate(routed))):
        events += [*(layers[layer] if recomputes else ()), *reversed(experts), layer]
    return [*events, "commit"]


_FORECASTS: dict[str, tuple[Sequence[int], dict[int, int], list[Any]]] = {
    "skipped units move it on": (range(5), {}, ["begin", 0, 3, [3, 4, 0, 1, 2]]),
    "an unknown unit leaves it in place": (range(3), {}, ["begin", 0, 9, [0, 1, 2], 1, [1, 2, 0]]),
    "far ahead is no skip": (range(100), {}, ["begin", 0, 60, [*range(100)], 20, [*range(20, 100), *range(20)]]),
    "backward continues where the recorded one began, though forward is cut short": (
        (),
        {},
        ["begin", 0, 1, 2, 3, "begin_backward", 3, 2, 1, 0, "commit", "begin", 0, "begin_backward", [3, 2, 1, 0]],
    ),
    "the first backward goes by its forward": (
        range(4),
        {2: 0, 3: 0},
        ["begin", 0, (0, [3]), 3, 1, "begin_backward", [1, 3, 0]],
    ),
    "experts come when their router has chosen": (
        (0, 1),
        _EXPERTS,
        [
            *(*_micro_batch([10, 11], [20, 21]), "begin", 0, {4: [0, 1]}, (0, [12, 10]), {4: [0, 12, 10, 1]}),
            *(12, 10, 1, (1, [23]), 23, "begin_backward", {5: [23, 1, 10, 12, 0]}),
        ],
    ),
    "experts of a layer that is computed once more": (
        (0, 1),
        _EXPERTS,
        [
            *(*_micro_batch([10, 11], [20, 21], recomputes=True), "begin", 0, (0, [12, 13]), 12, 13, 1, (1, [22]), 22),
            *("begin_backward", 1, (1, [22]), 22, 1, {4: [1, 0, 12, 13]}),
        ],
    ),
    "experts that are always used are certain": (
        (0, 1),
        _EXPERTS,
        [
            *(event for other in (11, 12, 13, 11) for event in _micro_batch([10, other], [20])),
            *("begin", 0, {5: [0, 10, 1, 20]}, *_micro_batch([11, 12], [20]), "begin", 0, {5: [0, 1, 20]}),
        ],
    ),
    "room is left for experts that are not known yet": (
        (0, 1),
        _EXPERTS,
        [*_micro_batch([10, 11], [20]), "begin", 0, {3: [0], 4: [0, 1]}, (0, [12]), {3: [0, 12, 1]}],
    ),
    "the next micro-batch does not go by the experts of this one": (
        (0, 1),
        _EXPERTS,
        [*_micro_batch([10, 11], [20]), *_micro_batch([12, 13], [21])[:-1], {20: [0, 1]}],
    ),
    "experts of a layer that is called twice come back in reverse": (
        (0, 1),
        _EXPERTS,
        [
            *("begin", 0, (0, [10]), 10, 1, (0, [11]), 11, "begin_backward", 11, 1, 10, 0, "commit"),
            *("begin", 0, (0, [12]), 12, 1, (0, [13]), 13, "begin_backward", {20: [13, 1, 12, 0]}),
        ],
    ),
}


@pytest.mark.parametrize(("guess", "experts", "events"), _FORECASTS.values(), ids=_FORECASTS)
def test_what_comes_next(guess: Sequence[int], experts: dict[int, int], events: list[Any]) -> None:
    _go(PrefetchSchedule(guess, experts), *events)


def test_a_record_becomes_the_forecast() -> None:
    schedule = PrefetchSchedule([0, 1, 2, 2, 1, 0])
    micro_batch = ["begin", 2, 0, 1, "begin_backward", 1, 0]
    _go(schedule, *micro_batch)
    assert schedule.has_backward
    assert schedule.order == (0, 1, 2, 2, 1, 0), "not before the micro-batch has ended well"
    _go(schedule, "commit", [2, 0, 1])
    assert (schedule.order, schedule.backward_start) == ((2, 0, 1, 1, 0), 3)
    _go(schedule, *micro_batch, [0, 2, 1], "commit")
    assert (schedule.order, schedule.backward_start) == ((2, 0, 1, 1, 0), 3), "the same again changes nothing"


def test_a_unit_in_use_is_recorded_once_but_again_when_backward_begins() -> None:
    schedule = _go(PrefetchSchedule([0, 1]), "begin")
    assert [schedule.touch(unit) for unit in (0, 0, 1)] == [True, False, True]
    _go(schedule, "begin_backward", "begin_backward")
    assert [schedule.touch(unit) for unit in (1, 1, 0)] == [True, False, True]
    _go(schedule, "commit")
    assert (schedule.order, schedule.backward_start) == ((0, 1, 1, 0), 2)


def test_experts_are_in_the_record_but_for_the_forecast_in_the_place_of_their_layer() -> None:
    schedule = _go(PrefetchSchedule([0, 1], _EXPERTS), *_micro_batch([10, 11], [20]))
    assert schedule.record == ((0, 10, 11, 1, 20, 20, 1, 11, 10, 0), 5)
    assert schedule.order == (0, -1, 1, -2, -2, 1, -1, 0)


def test_what_was_used_least_makes_room_first() -> None:
    batches = [event for other in (11, 12, 11) for event in _micro_batch([10, other], [20])]
    schedule = _go(PrefetchSchedule([0, 1], _EXPERTS), *batches, "begin", 0)
    places = [schedule.next_use(unit) for unit in (1, 10, 11, 12, 13)]
    assert places == sorted(set(places))


_orders = st.lists(st.integers(0, 5), min_size=1, max_size=14)


@given(_orders, st.integers(0, 13))
@settings(max_examples=80, deadline=None)
def test_the_next_use_of_a_unit_is_counted_from_the_one_in_use(order: list[int], num_touches: int) -> None:
    schedule = _go(PrefetchSchedule(order), *order[: num_touches % len(order)])
    upcoming = _upcoming(schedule)
    assert sorted(upcoming, key=schedule.next_use) == upcoming
    assert all(schedule.next_use(unit) < schedule.next_use(6) for unit in upcoming), "what is nowhere is needed last"


@st.composite
def _scans(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    order = draw(_orders)
    sizes = draw(st.lists(st.integers(1, 4), min_size=6, max_size=6))
    # The plan gives room for any two units at least.
    room = draw(st.integers(sum(sorted(sizes)[-2:]), sum(sizes) + 2))
    return order, sizes, room


@given(_scans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_simulated_fetches_are_those_of_the_pager(scan: tuple[list[int], list[int], int], prefetches: bool) -> None:
    order, pages, room = scan
    order = [unit for place, unit in enumerate(order) if place == 0 or unit != order[place - 1]]
    source = TensorSource()
    units = [frozen_unit(index, num_pages) for index, num_pages in enumerate(pages)]
    coordinator = make_parameter_cache(units, source, room * 4096, prefetches=prefetches, guess=order)
    fetches: list[tuple[int, int]] = []

    def note(position: int) -> None:
        fetches.extend((position - len(order), unit) for unit in source.fetched)
        source.fetched.clear()

    for cycle in range(4):
        coordinator.begin_forward()
        for place, unit in enumerate(order):
            coordinator.touch(units[unit])
            note(cycle * len(order) + place)
        coordinator.end_forward()
        coordinator.backwards.end(is_complete=True, fetches=True)
        note((cycle + 1) * len(order))  # already for the cycle to come
    coordinator.parameter_cache.close()
    simulated = simulate(order, [u.num_bytes for u in units], room * 4096, prefetches=prefetches, num_cycles=3).fetches
    assert [fetch for fetch in fetches if 0 <= fetch[0] < 3 * len(order)] == simulated


def test_what_is_about_to_be_updated_makes_room_only_on_demand() -> None:
    units, source = [frozen_unit(index, 1) for index in range(4)], TensorSource()
    coordinator = make_parameter_cache(units, source, 2 * 4096, prefetches=True)
    coordinator.touch(units[0])
    assert source.fetched == [0, 1]
    coordinator.parameter_cache.due.add(0)
    coordinator.touch(units[1])
    assert source.fetched == [0, 1] and units[0].flat is not None
    coordinator.parameter_cache.due.clear()
    coordinator.parameter_cache.pump()
    assert source.fetched == [0, 1, 2] and units[0].flat is None
    coordinator.parameter_cache.due.update((1, 2))
    coordinator.touch(units[2])
    coordinator.touch(units[3])
    assert source.fetched == [0, 1, 2, 3] and units[3].flat is not None, "what is needed now comes all the same"
    coordinator.parameter_cache.close()


class _Update:
    """Of a unit: pending until it is told otherwise."""

    def __init__(self) -> None:
        self.is_done = False
        self.flat: FlatBuffer | None = None

    def wait(self) -> None: ...

    def done(self) -> bool:
        return self.is_done

    def promote(self) -> None: ...

    @property
    def accepts_buffer(self) -> bool:
        return self.flat is None and not self.is_done

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        self.flat = flat
        return True


def test_an_update_of_what_is_needed_first_gets_a_buffer_as_soon_as_there_is_room() -> None:
    units = [frozen_unit(index, 1) for index in range(3)]
    source = TensorSource()
    coordinator = make_parameter_cache(units, source, 2 * 4096, prefetches=True, guess=[0, 1, 2])
    first, second = _Update(), _Update()
    for unit, update in ((units[1], first), (units[2], second)):
        coordinator.parameter_cache.make_resident(unit)
        unit.begin_update(update)
    wanted = _Update()
    units[0].begin_update(wanted)
    coordinator.parameter_cache.pump()
    coordinator.parameter_cache.attach_wanted()
    assert wanted.flat is None, "the units that are being updated fill all room"
    second.is_done = True
    coordinator.parameter_cache.attach_wanted()
    assert wanted.flat is not None and units[0].flat is wanted.flat
    assert units[2].flat is None
    assert source.fetched == [1, 2], "it fetches nothing"


def test_what_does_not_outlast_a_step() -> None:
    schedule = _go(PrefetchSchedule([0, 1, 2, 1]), "begin", 2, [2, 1, 0])
    assert _upcoming(schedule, is_around=False) == [2, 1]
    sizes = [5, 5, 5]
    assert simulate([0, 1, 2, 1], sizes, 15, prefetches=True, lasting_until=3).fetches == [(0, 0), (0, 1), (0, 2)]
    assert simulate([0, 1, 2, 1], sizes, 15, prefetches=False, lasting_until=3).fetches == [(0, 0), (1, 1), (2, 2)]
    two = simulate([0, 1, 1, 0], [5, 5], 5, prefetches=True, num_cycles=2, lasting_until=2)
    assert two.fetches == [(0, 0), (1, 1), (3, 0), (5, 1), (7, 0)]


class _Counted(list[int]):
    """Counts how often its elements are looked at."""

    looked = 0

    def __getitem__(self, place: Any) -> Any:
        self.looked += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("prefetches", [True, False])
def test_a_simulation_takes_work_in_proportion_to_the_places(prefetches: bool) -> None:
    order = _Counted([*range(2000), *reversed(range(2000))])
    simulate(order, [1] * 2000, 1000, prefetches=prefetches, num_cycles=50)
    assert order.looked < 40 * len(order)


def test_a_micro_batch_reads_each_dense_unit_and_each_routed_expert_once() -> None:
    """Room for a dense unit and the two experts that each layer uses: nothing else may be read in between."""
    source = TensorSource()
    units = [frozen_unit(index, 2 if index < 3 else 1) for index in range(15)]
    groups = {index: (index - 3) // 4 for index in range(3, 15)}
    coordinator = make_parameter_cache(units, source, 4 * 4096, prefetches=True, guess=range(15), experts=groups)
    for number in range(6):
        coordinator.begin_forward()
        source.fetched.clear()
        expected: list[int] = []
        for layer in range(3):
            coordinator.touch(units[layer])
            first = 3 + 4 * layer + number % 2  # others than the last time: none is certain
            second = first + 2
            coordinator.route(layer, [first, second])
            for expert in (first, second):
                coordinator.touch(units[expert])
            expected += [layer, first, second]
        coordinator.end_forward()
        coordinator.backwards.end(is_complete=True, fetches=True)
        if number > 1:
            assert source.fetched == [*expected[1:], 0], "and the first one of the next"
    coordinator.parameter_cache.close()
