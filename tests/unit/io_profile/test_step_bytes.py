"""The bytes of a step that the profile counts are those of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.io_profile.model import facts_of
from infinity.numerics.state_format import StateFormat


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("states", "shares"), [*((states, False) for states in StateFormat), (StateFormat.FP32, True)], ids=str
)
def test_the_bytes_of_a_step_are_those_of_the_engine(states: StateFormat, shares: bool, nvme_dir: Path) -> None:
    def build() -> nn.Module:
        layers = [nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))) for _ in range(6)]
        if shares:  # a block that needs two units at once
            layers[4].append(layers[0][0])
        return nn.Sequential(*layers)

    with torch.device("meta"):
        model = build()
    least = facts_of("six layers", model, states).least
    place = {"device": "nvme", "nvme_path": str(nvme_dir)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"host_memory_budget": least.budget_bytes, "state_dtype": states.value},
    }
    engine, *_ = infinity.initialize(model=build(), config=config)
    with engine:
        for _ in range(0 if shares else 3):  # in the first step it learns in which order units are used
            loss = engine(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum()
            engine.backward(loss)
            engine.step()
        plan = engine.plan
    assert plan.minimum_budget_bytes == least.budget_bytes
    assert (plan.predicted_read_bytes_per_step, plan.predicted_write_bytes_per_step) == (least.read, least.write)
