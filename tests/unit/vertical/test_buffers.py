"""A model before a step: what its forward changes in buffers is seen, and all of it is put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.vertical import restoring
from infinity.vertical.restoring import StepStart


class _Table(nn.Module):
    """Grows as rotary tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("later", None)
        self.norm = nn.BatchNorm1d(3)
        self.reach: Any = 2

    def forward(self, length: int) -> None:
        if length > self.reach:
            self.reach = torch.tensor(length)
            self.table = torch.ones(length)


def _write(model: Any) -> None:
    model.table.mul_(2)


def _grow(model: Any) -> None:
    model(5)


def _fill(model: Any) -> None:
    model.later = torch.ones(1)


def _remove(model: Any) -> None:
    del model.table


@pytest.mark.parametrize("change", [_write, _grow, _fill, _remove])
def test_a_changed_buffer_is_seen_and_put_back(change: Any) -> None:
    model = _Table()
    table = model.table
    start = StepStart(model)
    assert start.changed_buffer(()) is None
    change(model)
    name = "later" if change is _fill else "table"
    assert start.changed_buffer(()) == f"_Table.{name}"
    assert start.changed_buffer({model}) is None
    start.restore()
    assert model.table is table and torch.equal(table, torch.ones(2)) and model.later is None and model.reach == 2
    assert start.changed_buffer(()) is None


def test_new_attributes_go_and_random_numbers_come_again() -> None:
    model: Any = _Table()
    start = StepStart(model)
    drawn = torch.rand(()), random.random(), np.random.rand()
    model.count = 1
    start.restore()
    assert not hasattr(model, "count")
    assert drawn == (torch.rand(()), random.random(), np.random.rand())


def test_what_is_too_large_to_be_copied_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_MOST_COPIED_BYTES", 4)
    model = _Table()
    start = StepStart(model)
    start.restore()
    model.table.add_(1)
    with pytest.raises(ModelError, match=r"_Table\.table.*infinity\.schedule.*ordinary"):
        start.restore()
