"""A model before a step: what its forward changes in buffers is seen, and all of it is put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.vertical import buffers
from infinity.vertical.buffers import BlockBuffers, StepStart

_CPU = torch.device("cpu")


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
    start = StepStart(model, _CPU)
    assert start.changed_buffer(()) is None
    change(model)
    name = "later" if change is _fill else "table"
    assert start.changed_buffer(()) == f"_Table.{name}"
    assert start.changed_buffer({model}) is None
    start.restore()
    assert model.table is table and torch.equal(table, torch.ones(2)) and model.later is None and model.reach == 2
    assert start.changed_buffer(()) is None


def test_batch_norms_may_write_and_are_put_back() -> None:
    """Though their kernels write past the version."""
    model = _Table()
    start = StepStart(model, _CPU)
    model.norm(torch.randn(4, 3))
    assert start.changed_buffer(()) is None
    later = StepStart(model, _CPU, start)
    mean = model.norm.running_mean
    assert mean is not None
    before = mean.clone()
    model.norm(torch.randn(4, 3))
    later.restore()
    assert torch.equal(mean, before)
    start.restore()
    assert torch.equal(mean, torch.zeros(3))


def test_copies_of_what_has_not_changed_are_taken_over() -> None:
    model = _Table()
    first = StepStart(model, _CPU)
    second = StepStart(model, _CPU, first)
    assert second._kept[id(model.table)] is first._kept[id(model.table)]
    model.table.add_(1)
    third = StepStart(model, _CPU, second)
    model.table.add_(1)
    third.restore()
    assert torch.equal(model.table, torch.full((2,), 2.0))


def test_new_attributes_go_and_random_numbers_come_again() -> None:
    model: Any = _Table()
    start = StepStart(model, _CPU)
    drawn = torch.rand(()), random.random(), np.random.rand()
    model.count = 1
    start.restore()
    assert not hasattr(model, "count")
    assert drawn == (torch.rand(()), random.random(), np.random.rand())


def test_what_is_too_large_to_be_copied_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MOST_COPIED_BYTES", 4)
    model = _Table()
    start = StepStart(model, _CPU)
    start.restore()
    model.table.add_(1)
    with pytest.raises(ModelError, match=r"_Table\.table.*infinity\.schedule.*ordinary"):
        start.restore()


def test_buffers_of_a_block_are_the_same_tensors_with_the_same_values_again() -> None:
    model = _Table()
    found, table = BlockBuffers(model), model.table
    marks, values = BlockBuffers(nn.Linear(1, 1)).marks(), found.capture()
    assert marks == []
    model(4)
    table.mul_(3)
    values.restore()
    assert model.table is table and torch.equal(table, torch.ones(2))
