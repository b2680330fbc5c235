"""Which of many operations touch the same bytes.

[Note: finding overlaps] Thousands of small operations may be unfinished at once, and a look at all of them for each new one
would take longer than the drive. So each lies in a grid whose cells are at least as long as it is, one grid for each
power of two: it touches two cells at most, and whoever looks for a range looks into few. A write hides what it covers, so
that of many writes of the same bytes each finds the last one alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from swapper.scheduling.operation import Operation


class Overlaps:
    """Knows operations by what they touch, and their order. Its owner locks."""

    __slots__ = ("_cells", "_next", "_numbers")

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, dict[Operation, None]]] = {}
        """By the power of two, and then by the place in its grid."""
        self._numbers: dict[Operation, int] = {}
        self._next = 0

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._numbers)

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, operation: Operation) -> None:
        """Take an operation in, behind all others."""
        self._next += 1
        self._numbers[operation] = self._next
        self.show(operation)

    def hide(self, operation: Operation) -> None:
        """`of` no longer finds an operation that is in: what covers it waits for it, and is found in its place."""
        start, stop = operation.hazard_start, operation.hazard_stop
        power = (stop - start).bit_length()
        grid = self._cells.get(power, {})
        for place in _places(start, stop, power):
            cell = grid.get(place, {})
            cell.pop(operation, None)
            if not cell:
                grid.pop(place, None)
        if not grid:
            self._cells.pop(power, None)

    def show(self, operation: Operation) -> None:
        """`of` finds an operation, if it is in."""
        if operation not in self._numbers:
            return
        start, stop = operation.hazard_start, operation.hazard_stop
        power = (stop - start).bit_length()
        grid = self._cells.setdefault(power, {})
        for place in _places(start, stop, power):
            grid.setdefault(place, {})[operation] = None

    def pop(self, operation: Operation) -> None:
        """Leave an operation out, if it is there."""
        self._numbers.pop(operation, None)
        self.hide(operation)

    def of(self, operation: Operation) -> list[Operation]:
        """Return those that touch what this one touches, in their order."""
        start, stop = operation.hazard_start, operation.hazard_stop
        found: dict[Operation, None] = {}
        for power, grid in self._cells.items():
            places = _places(start, stop, power)
            near = [grid[place] for place in places if place in grid] if len(places) < len(grid) else grid.values()
            for cell in near:
                for other in cell:
                    if other.hazard_start < stop and start < other.hazard_stop:
                        found[other] = None
        return sorted(found, key=self._numbers.__getitem__) if len(found) > 1 else list(found)


def _places(start: int, stop: int, power: int) -> range:
    return range(start >> power, (max(start, stop - 1) >> power) + 1)
