"""A set of bytes, kept as sorted, disjoint, non-touching half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class IntervalSet:
    """A set of integers (bytes, or slots), stored as ranges."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []  # two parallel lists, both sorted: range i is [_starts[i], _stops[i])
        self._stops: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, start: int, stop: int) -> None:
        """Add the bytes ``[start, stop)``."""
        if start >= stop:
            return
        # Ranges [first:last] overlap or touch, and become one. [0, 10) and [20, 30) with add(10, 15): first = 0, since
        # the first range ends at 10, and last = 1. The result is [0, 15) and [20, 30).
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove the bytes ``[start, stop)``."""
        # Ranges [first:last] overlap; touching is not enough here. Of the outermost two, what is outside stays.
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if start >= stop or first >= last:
            return
        ends = ((self._starts[first], start), (stop, self._stops[last - 1]))
        kept = [(low, high) for low, high in ends if low < high]
        self._starts[first:last] = [low for low, _ in kept]
        self._stops[first:last] = [high for _, high in kept]

    def first_overlap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first piece of ``[start, stop)`` that is inside, or ``None``."""
        index = bisect_right(self._stops, start)
        if start >= stop or index >= len(self._starts) or self._starts[index] >= stop:
            return None
        return max(start, self._starts[index]), min(stop, self._stops[index])

    def first_gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first piece of ``[start, stop)`` that is not inside, or ``None``."""
        index = bisect_right(self._starts, start)  # of the next range that begins behind `start`
        if index:
            start = max(start, self._stops[index - 1])
        if start >= stop:
            return None
        # Ranges do not touch, so `start` is outside now: the gap lasts until the next range begins.
        return start, min([stop, *self._starts[index : index + 1]])
