"""Random generators go on where they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from infinity.numerics.random_states import are_unchanged, random_states, set_random_states


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_a_draw_from_any_of_them_is_noticed(draw: Callable[[], object]) -> None:
    before = random_states()
    assert are_unchanged(before)
    draw()
    assert not are_unchanged(before)
    set_random_states(before)
    assert are_unchanged(before)


def test_a_process_goes_on_with_the_state_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have another number than before: a launcher may give each process one GPU that it sees, or all."""
    there = {index: torch.tensor([index]) for index in range(2)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(there.values()))
    saved = random_states()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: there.update({index: state}))
    set_random_states(saved)
    assert there[0].tolist() == [1]
