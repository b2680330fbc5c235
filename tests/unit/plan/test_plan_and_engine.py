"""What `infinity plan` says fits begins and trains a step; what it says does not fit is refused."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError, ConfigError
from infinity.plan.ladder import Ladder
from infinity.plan.machine import Machine

_MACHINE = Machine(host_free_bytes=10**12, drive_free_bytes=10**12, device_free_bytes=None)


def _model(widths: list[int]) -> nn.Module:
    return nn.Sequential(*[nn.Linear(before, after) for before, after in itertools.pairwise(widths)])


@given(
    widths=st.lists(st.integers(1, 160), min_size=2, max_size=5),
    tiers=st.sampled_from([("none", "none"), ("none", "nvme"), ("nvme", "nvme")]),
    share=st.sampled_from([0.5, 0.99, 1.0, 1.01, 2.0]),
    has_bf16=st.booleans(),
    num_micro_batches=st.integers(1, 2),
    changes=st.sampled_from([{}, {"staging_buffer_bytes": 4096}, {"state_dtype": "int8"}, {"keep_in_memory": False}]),
)
@settings(max_examples=6, deadline=None)
def test_what_is_planned_is_what_begins(
    widths: list[int],
    tiers: tuple[str, str],
    share: float,
    has_bf16: bool,
    num_micro_batches: int,
    changes: dict[str, Any],
) -> None:
    with tempfile.TemporaryDirectory() as drive:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "bf16": {"enabled": has_bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                **{
                    f"offload_{name}": {"device": tier, "nvme_path": drive}
                    for name, tier in zip(("param", "optimizer"), tiers, strict=True)
                },
            },
            "infinity": changes,
        }
        with torch.device("meta"):
            shapes = _model(widths)
        free = Ladder(shapes, config, _MACHINE, drive, 1).given()
        budget = int(share * (free.minimum_bytes or 1 << 20))
        config["infinity"] = {**changes, "host_memory_budget": budget}
        planned = Ladder(shapes, config, _MACHINE, drive, 1).given()
        assert planned.fits is (free.fits and share >= 1)
        if not planned.fits:
            with pytest.raises((BudgetTooSmallError, ConfigError)):
                infinity.initialize(model=_model(widths), config=config)
            return
        engine = infinity.initialize(model=_model(widths), config=config)[0]
        dtype = torch.bfloat16 if has_bf16 else torch.float32
        with engine:
            for _ in range(num_micro_batches):
                engine.backward(engine(torch.ones(1, widths[0], dtype=dtype)).float().sum())
                engine.step()
            assert engine.global_steps == 1
            assert planned.plan.placement == engine.plan.placement
            assert engine.plan.placement.minimum_bytes <= budget
