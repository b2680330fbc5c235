"""Overlapping operations are found, in their order, and without a look at all others."""

from __future__ import annotations

import random

import numpy as np
import pytest

from swapper.backend import Direction
from swapper.config import Priority
from swapper.extents.extent import Extent
from swapper.scheduling.ledger import Overlaps
from swapper.scheduling.operation import Operation

_SPACE = 1 << 16


def _operation(start: int, num_bytes: int, number: int, block_bytes: int = 1) -> Operation:
    extent = Extent("x", 0, _SPACE, None)
    made = Operation(Direction.WRITE, extent, start, np.empty(num_bytes, np.uint8), Priority.DEMAND, block_bytes)
    made.number = number
    return made


@pytest.mark.parametrize("block_bytes", [1, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_they_are_those_that_a_look_at_all_finds(seed: int, block_bytes: int) -> None:
    chance = random.Random(seed)
    overlaps, known = Overlaps(), list[Operation]()
    for number in range(400):
        num_bytes = chance.choice([0, 1, chance.randrange(64), chance.randrange(5000), chance.randrange(_SPACE)])
        new = _operation(chance.randrange(_SPACE - num_bytes + 1), num_bytes, number, block_bytes)
        expected = [e for e in known if e.hazard_start < new.hazard_stop and new.hazard_start < e.hazard_stop]
        assert overlaps.of(new) == expected
        overlaps.add(new)
        known.append(new)
        if chance.random() < 0.4:
            overlaps.pop(known.pop(chance.randrange(len(known))))
    for operation in known:
        overlaps.pop(operation)
        overlaps.pop(operation)
    assert not overlaps.rows


@pytest.mark.parametrize("num_bytes", [1, 16, 4096])
def test_small_operations_are_not_compared_with_all_others(num_bytes: int) -> None:
    looked_at = list[object]()

    class Rows(list[tuple[int, int, Operation]]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            found = super().__getitem__(index)
            if isinstance(index, slice):
                looked_at.extend(found)
            return found

    overlaps, num = Overlaps(), 2000
    overlaps.rows = Rows()
    for index in range(num):
        operation = _operation(index * num_bytes, num_bytes, index)
        assert overlaps.of(operation) == []
        overlaps.add(operation)
    assert len(looked_at) < 10 * num
