"""The two state machines: exactly the transitions in their tables are possible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from swapper import Extent, Priority
from swapper.backend import Direction
from swapper.extents.extent import LEGAL_EXTENT_TRANSITIONS, ExtentState
from swapper.scheduling.operation import LEGAL_OPERATION_TRANSITIONS, Operation, OperationState


@pytest.mark.parametrize(("before", "after"), [*itertools.product(ExtentState, repeat=2)])
def test_extent(before: ExtentState, after: ExtentState) -> None:
    extent = Extent("x", 0, 1, None)
    extent.state = before
    if after in LEGAL_EXTENT_TRANSITIONS[before]:
        extent.move_to(after)
        assert extent.state is after
    else:
        with pytest.raises(RuntimeError, match=f"'x' cannot go from {before.value} to {after.value}"):
            extent.move_to(after)
        assert extent.state is before


@pytest.mark.parametrize(("before", "after"), [*itertools.product(OperationState, repeat=2)])
def test_operation(before: OperationState, after: OperationState) -> None:
    array = np.zeros(1, dtype=np.uint8)
    operation = Operation(Direction.READ, Extent("x", 0, 1, None), 0, array, Priority.DEMAND, 1)
    operation.state = before
    if after in LEGAL_OPERATION_TRANSITIONS[before]:
        operation.move_to(after)
        assert operation.state is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {before.value} to {after.value}"):
            operation.move_to(after)
        assert operation.state is before


def test_every_operation_can_end() -> None:
    for state in OperationState:
        reached, frontier = {state}, [state]
        while frontier:
            following = LEGAL_OPERATION_TRANSITIONS[frontier.pop()] - reached
            reached |= following
            frontier.extend(following)
        assert OperationState.DONE in reached
    assert not LEGAL_OPERATION_TRANSITIONS[OperationState.DONE]
