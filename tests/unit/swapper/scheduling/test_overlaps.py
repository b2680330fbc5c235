"""Overlapping operations are found, in their order, and without a look at all others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from swapper.backend import Direction
from swapper.config import Priority
from swapper.extents.extent import Extent
from swapper.scheduling.operation import Operation
from swapper.scheduling.overlaps import Overlaps

_SPACE = 1 << 16


def _operation(start: int, num_bytes: int, block_bytes: int = 1, kind: type[Operation] = Operation) -> Operation:
    extent = Extent("x", 0, _SPACE, None)
    memory = np.empty(num_bytes, dtype=np.uint8)
    return kind(Direction.WRITE, extent, start, memory, Priority.DEMAND, block_bytes)


@pytest.mark.parametrize("block_bytes", [1, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_they_are_those_that_a_look_at_all_finds(seed: int, block_bytes: int) -> None:
    chance = random.Random(seed)
    overlaps, known = Overlaps(), list[Operation]()
    for _ in range(400):
        num_bytes = chance.choice([0, 1, chance.randrange(64), chance.randrange(5000), chance.randrange(_SPACE)])
        new = _operation(chance.randrange(_SPACE - num_bytes + 1), num_bytes, block_bytes)
        expected = [e for e in known if e.hazard_start < new.hazard_stop and new.hazard_start < e.hazard_stop]
        assert overlaps.of(new) == expected
        overlaps.add(new)
        known.append(new)
        if chance.random() < 0.4:
            overlaps.pop(known.pop(chance.randrange(len(known))))
        assert list(overlaps) == known and bool(overlaps) == bool(known)
    for operation in known:
        overlaps.pop(operation)
        overlaps.pop(operation)
    assert not overlaps and not overlaps._cells


@pytest.mark.parametrize("num_bytes", [1, 16, 4096])
def test_small_operations_are_not_compared_with_all_others(num_bytes: int) -> None:
    num_looks = 0

    class Watched(Operation):
        def __getattribute__(self, name: str) -> Any:
            nonlocal num_looks
            num_looks += name == "hazard_start"
            return super().__getattribute__(name)

    overlaps, num = Overlaps(), 2000
    for index in range(num):
        operation = _operation(index * num_bytes, num_bytes, kind=Watched)
        assert overlaps.of(operation) == []
        overlaps.add(operation)
    assert num_looks < 10 * num
