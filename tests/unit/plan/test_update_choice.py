"""Where everything stays in memory, updates run in the step, and everywhere else beside the model."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("tier", "own", "expected"),
    [
        *((tier, {"host_memory_budget": "64MB"}, "step") for tier in ("none", "cpu", "nvme")),
        ("nvme", {"host_memory_budget": "64MB", "update": "in_backward"}, "in_backward"),
        ("nvme", {"host_memory_budget": "64MB", "update": "deferred"}, "deferred"),
        ("nvme", {"host_memory_budget": "64MB", "keep_in_memory": False}, "in_backward"),
        ("nvme", {"host_memory_budget": "8MB"}, "in_backward"),
    ],
)
def test_all_in_memory_is_updated_in_the_step_and_what_is_asked_for_or_paged_beside_the_model(
    tier: str, own: dict[str, Any], expected: str, tmp_path: Path, several_threads: None
) -> None:
    with infinity.initialize(model=_model(), config=_config(tier, tmp_path, infinity=own))[0] as engine:
        assert engine.plan.update == expected
        assert engine.plan.request.update_workers == torch.get_num_threads() or expected != "step"
        moved = engine.plan.predicted_read_bytes_per_step + engine.plan.predicted_write_bytes_per_step
        assert moved == 0 or expected != "step"


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
