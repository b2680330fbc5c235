"""Space in a volume."""

from __future__ import annotations

import pytest

from swapper import ALIGNMENT, ArgumentError
from swapper.extents.allocator import SpaceAllocator


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
