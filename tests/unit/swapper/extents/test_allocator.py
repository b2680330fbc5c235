"""Space in a volume."""

from __future__ import annotations

import itertools
import random

import pytest

from swapper import ALIGNMENT, ArgumentError, OutOfSpaceError
from swapper.extents.allocator import SpaceAllocator


def test_ranges_never_overlap_and_space_comes_back() -> None:
    allocator = SpaceAllocator(64 * ALIGNMENT)
    dice = random.Random(0)
    held: list[tuple[int, int]] = []
    for _ in range(500):
        if held and dice.random() < 0.5:
            allocator.release(*held.pop(dice.randrange(len(held))))
        else:
            num_bytes = dice.randrange(1, 10 * ALIGNMENT)
            try:
                start = allocator.allocate(num_bytes, "x")
            except OutOfSpaceError as error:
                assert error.largest_free_bytes < num_bytes
                continue
            assert start % ALIGNMENT == 0
            size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            assert start + size <= 64 * ALIGNMENT
            assert all(start + size <= low or low + length <= start for low, length in held)
            held.append((start, size))
        ends = [(0, 0), *sorted((low, low + length) for low, length in held), (64 * ALIGNMENT, 0)]
        holes = [(low - end, end) for (_, end), (low, _) in itertools.pairwise(ends) if low > end]
        assert allocator._sizes == sorted(holes)
        assert allocator.largest_free_bytes == max((size for size, _ in holes), default=0)
        assert allocator.free_bytes == 64 * ALIGNMENT - sum(size for _, size in held)
    for start, size in held:
        allocator.release(start, size)
    assert allocator.allocate(64 * ALIGNMENT, "everything") == 0


def test_smallest_fitting_hole_is_used() -> None:
    allocator = SpaceAllocator(10 * ALIGNMENT)
    first = allocator.allocate(4 * ALIGNMENT, "a")
    allocator.allocate(ALIGNMENT, "b")
    second = allocator.allocate(2 * ALIGNMENT, "c")
    allocator.allocate(3 * ALIGNMENT, "d")
    allocator.release(first, 4 * ALIGNMENT)
    allocator.release(second, 2 * ALIGNMENT)
    assert allocator.allocate(2 * ALIGNMENT, "e") == second


def test_sizes() -> None:
    allocator = SpaceAllocator(ALIGNMENT)
    assert allocator.allocate(0, "empty") == 0
    assert allocator.free_bytes == ALIGNMENT
    with pytest.raises(ArgumentError, match="'negative' cannot have -1 bytes"):
        allocator.allocate(-1, "negative")
