"""Where everything stays in memory, updates run in the step, and everywhere else as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


def _config(tier: str, directory: Path, **changes: Any) -> dict[str, Any]:
    place = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    } | changes


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_all_in_memory_is_updated_in_the_step_with_the_same_bits(
    tier: str, clip: float, tmp_path: Path, several_threads: None
) -> None:
    model, own = _model(), {"host_memory_budget": "64MB"}
    twin = copy.deepcopy(model)
    config = _config(tier, tmp_path, gradient_clipping=clip, infinity=own)
    engine, *_ = infinity.initialize(model=model, config=config)
    assert (engine.plan.update, engine.plan.request.update_workers) == ("step", torch.get_num_threads())
    assert engine.plan.predicted_read_bytes_per_step == engine.plan.predicted_write_bytes_per_step == 0
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    for step in range(3):
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
        twin(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    with engine:
        engine.close(restore_weights=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"host_memory_budget": "64MB", "update": "in_backward"}, "in_backward"),
        ({"host_memory_budget": "64MB", "update": "deferred"}, "deferred"),
        ({"host_memory_budget": "64MB", "keep_in_memory": False}, "in_backward"),
        ({"host_memory_budget": "8MB"}, "in_backward"),
    ],
)
def test_what_is_asked_for_or_paged_is_updated_beside_the_model(
    own: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with infinity.initialize(model=_model(), config=_config("nvme", tmp_path, infinity=own))[0] as engine:
        assert (engine.plan.update, engine.plan.request.update_workers) == (expected, 1)


def test_the_smallest_budget_is_what_it_was(tmp_path: Path) -> None:
    config = _config("nvme", tmp_path, infinity={"host_memory_budget": "64MB"})
    with infinity.initialize(model=_model(), config=config)[0] as engine:
        least, update = engine.plan.minimum_budget_bytes, engine.plan.update
    assert update == "step"
    config["infinity"]["host_memory_budget"] = least
    with infinity.initialize(model=_model(), config=config)[0] as engine:
        assert (engine.plan.update, engine.plan.minimum_budget_bytes) == ("in_backward", least)
    config["infinity"]["host_memory_budget"] = least - 1
    with pytest.raises(BudgetTooSmallError, match=str(least)):
        infinity.initialize(model=_model(), config=config)
