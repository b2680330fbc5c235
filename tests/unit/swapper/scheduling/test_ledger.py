"""Small operations are admitted without a look at all others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from swapper.backend import Direction
from swapper.config import Priority
from swapper.extents.extent import Extent
from swapper.scheduling.ledger import Ledger
from swapper.scheduling.operation import Operation

_SPACE = 1 << 16


def _write(ledger: Ledger, start: int, num_bytes: int, block_bytes: int = 1) -> Operation:
    """A write that is admitted."""
    array = np.empty(num_bytes, np.uint8)
    scheduler = SimpleNamespace(block_bytes=block_bytes, on_complete=None)
    made = Operation(scheduler, Direction.WRITE, ledger.extent, start, array, Priority.DEMAND)
    ledger.admit(made)
    return made


def _ledger() -> Ledger:
    return Ledger(Extent("x", 0, _SPACE * 256, None, is_prewritten=True))


@pytest.mark.parametrize("block_bytes", [1, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_they_are_those_that_a_look_at_all_finds(seed: int, block_bytes: int) -> None:
    chance = random.Random(seed)
    ledger, known = _ledger(), list[Operation]()
    for _ in range(400):
        num_bytes = chance.choice([0, 1, chance.randrange(64), chance.randrange(5000), chance.randrange(_SPACE)])
        new = _write(ledger, chance.randrange(_SPACE - num_bytes + 1), num_bytes, block_bytes)
        expected = [e for e in known if e.hazard_start < new.hazard_stop and new.hazard_start < e.hazard_stop]
        assert list(new.blockers) == expected
        known.append(new)
        if chance.random() < 0.4:
            ledger.remove(known.pop(chance.randrange(len(known))))
    for operation in known:
        ledger.remove(operation)
        ledger.remove(operation)
    assert not ledger.rows


@pytest.mark.parametrize("num_bytes", [1, 16, 4096])
def test_small_operations_are_not_compared_with_all_others(num_bytes: int) -> None:
    looked_at = list[object]()

    class Rows(list[tuple[int, int, Operation]]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            found = super().__getitem__(index)
            if isinstance(index, slice):
                looked_at.extend(found)
            return found

    ledger, num = _ledger(), 2000
    ledger.rows = Rows()
    for index in range(num):
        assert not _write(ledger, index * num_bytes, num_bytes).blockers
    assert len(looked_at) < 10 * num
