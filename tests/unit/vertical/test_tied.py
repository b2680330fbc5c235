"""The parts of a tied weight's gradient are added up micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from infinity.activations.boundary import Boundary
from infinity.metrics.clock import StepClock
from infinity.vertical.tied import TiedParts


class _NoSpace:
    """Nothing may leave memory."""

    def take(self, num_bytes: int) -> None:
        raise AssertionError("a part was spilled")

    give_back = discard = take


def _parts() -> TiedParts:
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor, tensor._version

    space: Any = _NoSpace()
    return TiedParts(Boundary(space, StepClock(), pack, lambda saved: saved[0], None), [(0, 3)])


def test_parts_wait_for_the_last_one() -> None:
    parts, heads, embeddings = _parts(), torch.randn(2, 5).bfloat16(), torch.randn(2, 5).bfloat16()
    for batch in range(2):
        assert parts.join(batch, (0, 3), heads[batch].clone(), is_last=False) is None
    assert parts.waiting_of(1) == [(0, 3)] and len(list(parts.kept)) == 2
    for batch in range(2):
        whole = parts.join(batch, (0, 3), embeddings[batch].clone(), is_last=True)
        assert whole is not None and torch.equal(whole, heads[batch] + embeddings[batch])
    assert parts.waiting_of(0) == parts.waiting_of(1) == []


def test_a_part_that_stays_alone() -> None:
    parts, part = _parts(), torch.ones(2)
    assert parts.join(0, (0, 3), part.clone(), is_last=False) is None
    alone = parts.join(0, (0, 3), None, is_last=True)
    assert alone is not None and torch.equal(alone, part)
    single = parts.join(1, (0, 3), part.clone(), is_last=True)
    assert single is not None and torch.equal(single, part)
