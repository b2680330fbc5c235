"""Requests and plans for tests, with everything on drives unless they say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.numerics.chunk_format import ChunkFormat
from infinity.plan.placement import place
from infinity.plan.plan import Plan
from infinity.plan.sizes import Request, UnitSize


def request_of(**changes: Any) -> Request:
    """What a config asks for: bf16 with remainders in more memory than is needed."""
    values: dict[str, Any] = {
        "budget_bytes": 1 << 40,
        "device_budget_bytes": None,
        "param_tier": "nvme",
        "optimizer_tier": "nvme",
        "record_format": ChunkFormat.of(torch.bfloat16, has_remainder=True),
        "shares_host_memory": True,
        "update": "in_backward",
        "num_micro_batches": 1,
        "page_bytes": None,
        "prefetches": True,
        "can_spill": True,
    }
    return Request(**values | changes)


def plan_of(units: Sequence[UnitSize], request: Request, **changes: Any) -> Plan:
    """A plan for it, without predictions."""
    numel = sum(unit.trainable_numel for unit in units)
    values: dict[str, Any] = {
        "num_parameters": numel,
        "num_trainable": numel,
        "units": tuple((unit.name, unit.weight_bytes) for unit in units),
        "param_tier": request.param_tier,
        "optimizer_tier": request.optimizer_tier,
        "update": request.update,
        "resting_bytes": {"host": {"weights": 5_000_000, "states": 0}, "nvme": {"remainders": 7_000_000}},
        "host_budget_bytes": request.budget_bytes,
        "host_budget_source": "from the config",
        "minimum_budget_bytes": 1 << 20,
        "placement": place(units, request),
        "num_micro_batches": request.num_micro_batches,
    }
    return Plan(**values | changes)
