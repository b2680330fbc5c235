"""Frozen parameters of other dtypes keep their values through training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import OtherNumbersWarning
from tests.exactness.lockstep import everything_on_nvme

_IN_MEMORY: dict[str, Any] = {"zero_optimization": {"offload_param": None, "offload_optimizer": None}}


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), requires_grad=False)
        self.numbers = nn.Parameter(torch.tensor([2**24 + 1, 2**53 + 1]), requires_grad=False)
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.linear(x) * self.phases).abs().sum() * self.scale.sum()
        return y + self.numbers.sum() % 7


@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
def test_fp64_integers_and_complex_numbers_keep_every_bit(place: dict[str, Any], tmp_path: Path) -> None:
    plain, model = Constants(), Constants()
    optimizer = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), lr=0.1, fused=True)
    changes = {**place, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}}}
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path, changes))
    for _ in range(2):
        expected = plain(torch.ones(2, 4))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(torch.ones(2, 4))
        engine.backward(loss)
        engine.step()
        assert loss.dtype == torch.float64 and torch.equal(loss, expected)
    engine.close(restore_weights=True)
    for fqn, value in plain.named_parameters():
        found = model.get_parameter(fqn)
        assert type(found) is nn.Parameter and found.dtype == value.dtype and torch.equal(found, value), fqn


def test_trained_fp64_is_warned_of(tmp_path: Path) -> None:
    model = Constants()
    model.scale.requires_grad_(True)
    with pytest.warns(OtherNumbersWarning, match=r"'scale' is fp64, but .* fp32.*model\.float"):
        engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    engine.close()


@pytest.mark.filterwarnings("ignore::infinity.errors.OtherNumbersWarning")
def test_a_model_that_is_fp64_as_a_whole_is_cast_as_a_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[0].requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
        assert engine(torch.ones(2, 4)).dtype == torch.float32
