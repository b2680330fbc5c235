"""Requests and plans for tests, with everything on drives unless they say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.numerics.chunk_format import ChunkFormat
from infinity.plan.placement import place
from infinity.plan.plan import Plan
from infinity.plan.sizes import Request, UnitSize, guessed_order


def request_of(**changes: Any) -> Request:
    """What a config asks for: bf16 with remainders in more memory than is needed."""
    values: dict[str, Any] = {
        "budget_bytes": 1 << 40,
        "device_budget_bytes": None,
        "param_tier": "nvme",
        "optimizer_tier": "nvme",
        "record_format": ChunkFormat.of(torch.bfloat16, has_remainder=True),
        "uses_host_memory": True,
        "update": "in_backward",
        "num_micro_batches": 1,
        "staging_buffer_bytes": None,
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
        "sizes": tuple(units),
        "request": request,
        "placement": place(units, request),
        "order": tuple(guessed_order(len(units))),
        "backward_start": len(units),
        "host_budget_source": "from the config",
    }
    return Plan(**values | changes)
