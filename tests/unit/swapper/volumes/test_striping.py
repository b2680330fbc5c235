"""The map from addresses to drives: every byte has a place of its own, and drives have turns as their speeds say."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.volumes.striping import MOST_TURNS, StripeMap, deal, were_full

_STRIPE = 4096


def _map(num_stripes: int, speeds: list[float], rooms: list[int]) -> StripeMap:
    return StripeMap(num_stripes, _STRIPE, speeds, rooms, range(len(rooms)), rooms)


def _columns(stripes: StripeMap, num_stripes: int) -> list[int]:
    return [stripes.file_ranges(stripe * _STRIPE, 1)[0][0] for stripe in range(num_stripes)]


@pytest.mark.parametrize(
    ("speeds", "counts"),
    [
        ([5.0], [1]),
        ([1.0, 1.0], [1, 1]),
        ([3e9, 2.8e9, 3.1e9], [1, 1, 1]),  # within a tenth: equal
        ([3.0, 1.0], [3, 1]),
        ([1.0, 3.0], [1, 3]),
        ([7e9, 3.5e9, 3.4e9], [2, 1, 1]),
        ([100.0, 1.0], [1, 0]),  # would hold the others up
        ([1.0, 0.0, 1.0], [1, 0, 1]),
        ([2.5] * 40, [1] * 40),
        ([], []),
        ([0.0, 0.0], [0, 0]),
    ],
)
def test_turns_are_as_many_as_speeds_are_worth(speeds: list[float], counts: list[int]) -> None:
    cycle = deal(speeds)
    assert [cycle.count(column) for column in range(len(speeds))] == counts


def test_turns_are_spread_evenly() -> None:
    assert deal([1.0] * 3) == [0, 1, 2]
    assert deal([1.0, 1.2, 1.0, 1.0]) == [0, 1, 2, 3], "equal drives, one of them measured a fifth too fast"
    assert deal([2.0, 1.0, 1.0]) in ([0, 1, 2, 0], [0, 1, 0, 2])
    for speeds in ([5.0, 1.0], [4.0, 3.0], [9.0, 5.0, 2.0]):
        cycle = deal(speeds) * 3
        for column in range(len(speeds)):
            turns = [turn for turn, each in enumerate(cycle) if each == column]
            gaps = {after - before for before, after in pairwise(turns)}
            assert max(gaps) - min(gaps) <= 2, (speeds, cycle)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
def test_nearly_all_bandwidth_is_used(speeds: list[float]) -> None:
    cycle = deal(speeds)
    assert 1 <= max(map(cycle.count, cycle)) <= MOST_TURNS
    seconds = max(cycle.count(column) / speed for column, speed in enumerate(speeds))
    # Speeds within a quarter are taken for equal where that loses up to a tenth of the bandwidth.
    assert len(cycle) / seconds > 0.88 * sum(speeds)


@given(st.data())
def test_every_stripe_has_a_place_of_its_own_within_its_room(data: st.DataObject) -> None:
    num_drives = data.draw(st.integers(1, 5))
    rooms = data.draw(st.lists(st.integers(0, 40), min_size=num_drives, max_size=num_drives))
    pools = data.draw(st.lists(st.integers(0, 2), min_size=num_drives, max_size=num_drives))
    pool_rooms = data.draw(st.lists(st.integers(0, 60), min_size=3, max_size=3))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 3.0, 0.3, 50.0]), min_size=num_drives, max_size=num_drives))
    in_pools = [sum(room for room, each in zip(rooms, pools, strict=True) if each == pool) for pool in range(3)]
    most = sum(map(min, in_pools, pool_rooms))
    num_stripes = data.draw(st.integers(0, most))
    stripes = StripeMap(num_stripes, _STRIPE, speeds, rooms, pools, pool_rooms)

    places = [stripes.file_ranges(stripe * _STRIPE + 5, 1)[0][:2] for stripe in range(num_stripes)]
    assert len(set(places)) == num_stripes
    used = Counter(column for column, _ in places)
    for column in range(num_drives):
        # Exactly what is used has to be reserved: the places of a file have no gaps.
        offsets = sorted(offset for each, offset in places if each == column)
        assert offsets == [place * _STRIPE + 5 for place in range(used[column])]
        assert stripes.file_bytes(column) == used[column] * _STRIPE
        assert used[column] <= rooms[column]
    for pool in range(3):
        assert sum(used[column] for column in range(num_drives) if pools[column] == pool) <= pool_rooms[pool]
    with pytest.raises(ValueError, match=f"room for {most} stripes, {most + 1} are needed"):
        StripeMap(most + 1, _STRIPE, speeds, rooms, pools, pool_rooms)


@given(st.data())
def test_what_is_dealt_later_leaves_all_where_it_was_and_follows_from_what_each_drive_holds(
    data: st.DataObject,
) -> None:
    held = [0] * data.draw(st.integers(1, 4))
    equal = [1.0] * len(held)
    places: list[tuple[int, int]] = []
    for _ in range(4):
        more = data.draw(st.lists(st.integers(0, 5), min_size=len(held), max_size=len(held)))
        rooms = [num + new * (not is_full) for num, new, is_full in zip(held, more, were_full(held), strict=True)]
        num_stripes = data.draw(st.integers(sum(held), sum(rooms)))
        stripes = _map(num_stripes, equal, rooms)
        found = [stripes.file_ranges(stripe * _STRIPE, 1)[0][:2] for stripe in range(num_stripes)]
        assert found[: len(places)] == places
        places = found
        held = [stripes.file_bytes(column) // _STRIPE for column in range(len(held))]
        again = _map(num_stripes, equal, held)
        assert [again.file_ranges(stripe * _STRIPE, 1)[0][:2] for stripe in range(num_stripes)] == places


def test_a_drive_that_is_too_slow_is_used_when_the_others_are_full() -> None:
    assert _columns(_map(5, [100.0, 1.0], [3, 9]), 5) == [0, 0, 0, 1, 1]


def test_the_number_of_parts_does_not_grow_with_the_address_space() -> None:
    rooms = [10_000_000, 3_000_000, 200_000_000]
    stripes = _map(200_000_000, [3.0, 2.0, 1.0], rooms)
    assert len(stripes._zones) <= 4
    assert sum(stripes.file_bytes(column) for column in range(3)) == 200_000_000 * _STRIPE
    assert stripes.file_ranges(199_999_999 * _STRIPE + 17, 1)[0][:2] == (2, stripes.file_bytes(2) - _STRIPE + 17)
