"""Sets of byte ranges, against a plain Python set of bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swapper.extents.intervals import IntervalSet

_RANGES = st.tuples(st.integers(0, 24), st.integers(0, 24)).map(sorted)


@given(st.lists(st.tuples(st.booleans(), _RANGES), max_size=20), _RANGES)
def test_behaves_like_a_set_of_bytes(steps: list[tuple[bool, list[int]]], question: list[int]) -> None:
    intervals, model = IntervalSet(), set[int]()
    for is_added, (start, stop) in steps:
        if is_added:
            intervals.add(start, stop)
            model |= set(range(start, stop))
        else:
            intervals.remove(start, stop)
            model -= set(range(start, stop))
    ranges = list(intervals)
    assert {byte for start, stop in ranges for byte in range(start, stop)} == model
    assert all(start < stop for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges)), "ranges touch"
    assert bool(intervals) == bool(model)

    start, stop = question
    asked = set(range(start, stop))
    overlap, gap = intervals.first_overlap(start, stop), intervals.first_gap(start, stop)
    assert overlap == _first_run(asked & model)
    assert gap == _first_run(asked - model)


def _first_run(numbers: set[int]) -> tuple[int, int] | None:
    if not numbers:
        return None
    start = stop = min(numbers)
    while stop in numbers:
        stop += 1
    return start, stop
