"""What placement has to know is read from model and config."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.plan.inputs import make_units
from infinity.plan.machine import Bandwidth
from infinity.plan.sizes import Request


@pytest.mark.parametrize(
    ("cores", "tier", "speed", "wanted", "expected"),
    [
        (16, "nvme", None, None, 4),
        (16, "nvme", 0.6e9, None, 1),
        (16, "nvme", 7e9, None, 2),
        (16, "nvme", 28e9, None, 6),
        (64, "nvme", 60e9, None, 8),
        (5, "nvme", 28e9, None, 3),
        (16, "cpu", 0.6e9, None, 8),
        (64, "nvme", 0.6e9, 12, 12),
        (2, "cpu", None, None, 1),
        (16, "none", None, None, 1),
    ],
)
def test_update_workers_beside_a_gpu_follow_the_drives(
    monkeypatch: pytest.MonkeyPatch, cores: int, tier: str, speed: float | None, wanted: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    optimizer = {"device": tier, **({"nvme_path": "/tmp"} if tier == "nvme" else {})}
    own: dict[str, Any] = {} if wanted is None else {"update_workers": wanted}
    zero = {"stage": 3, "offload_optimizer": optimizer}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero, "infinity": own})
    model = nn.Linear(4, 4)
    units = make_units(model, config)
    drives = None if speed is None else Bandwidth(speed, speed, speed, "2026-01-01T00:00:00")
    request = Request.of(config, model, units, budget_bytes=1 << 30, uses_host_memory=False, bandwidth=drives)
    assert request.update_workers == expected


def test_update_workers_on_a_cpu_have_the_cores_that_computing_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 14)
    config = load_config({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    model = nn.Linear(4, 4)
    request = Request.of(config, model, make_units(model, config), budget_bytes=1 << 30, uses_host_memory=True)
    assert request.update_workers == 2
