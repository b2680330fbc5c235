"""A plan is the same after it was written down as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat
from infinity.numerics.state_format import StateFormat
from infinity.plan import cost_model
from infinity.plan.cost_model import Traffic
from infinity.plan.machine import Bandwidth
from infinity.plan.plan import Plan, as_record, of_record
from infinity.plan.sizes import Request, UnitSize
from infinity.units.layout import CHUNK_GRANULE
from tests.unit.plan.planned import plan_of, request_of

_NUMEL = 40 * CHUNK_GRANULE
_UNITS = tuple(
    UnitSize(f"layers.{index}", 2 * _NUMEL, _NUMEL, 2, index != 2, ("w", _NUMEL) if index else None)
    for index in range(6)
)


def _request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "budget_bytes": 1 << 25,
        "record_format": ChunkFormat.of(torch.bfloat16, has_remainder=True, states=StateFormat.INT8),
        "update": "deferred",
        "num_micro_batches": 2,
        "used_together": (frozenset({1, 2}), frozenset({3})),
    }
    return request_of(**values | changes)


def _plan(request: Request, traffic: Traffic) -> Plan:
    speed = Bandwidth(2e9, 1e9, 1.5e9, "2026-01-02T03:04:05+00:00")
    plan = plan_of(_UNITS, request, bandwidth=speed, seen_bytes_per_second=1e9, compute_seconds=0.5, traffic=traffic)
    return plan.predicted()


@pytest.mark.parametrize(
    ("request_", "traffic"),
    [
        (_request(), Traffic()),
        (_request(keeps_in_memory=False, record_format=ChunkFormat.of(torch.float32, has_remainder=False)), Traffic()),
        (_request(record_format=ChunkFormat.of(torch.float16, has_remainder=False)), Traffic(True, 10, 20)),
    ],
)
def test_a_record_gives_the_same_again(request_: Request, traffic: Traffic) -> None:
    plan = _plan(request_, traffic)
    again = of_record(json.loads(json.dumps(as_record(plan))))
    assert again == plan and again.predicted() == plan
    assert again.predicted_step_seconds == plan.predicted_step_seconds


def test_every_field_is_recorded() -> None:
    record = as_record(_plan(_request(), Traffic()))
    assert {each.name for each in dataclasses.fields(Plan)} | {"predicted_seconds"} == set(record)
    assert {each.name for each in dataclasses.fields(Request)} == set(record["request"])


@pytest.mark.parametrize("path", ["request", "placement", "sizes", "traffic.is_vertical"])
def test_what_is_damaged_is_refused(path: str) -> None:
    record = json.loads(json.dumps(as_record(_plan(_request(), Traffic()))))
    block = record
    *parents, name = path.split(".")
    for parent in parents:
        block = block[parent]
    block[name] = {"no": 1}
    with pytest.raises((KeyError, TypeError, ValueError)):
        of_record(record)


@pytest.mark.parametrize("megabytes", [3, 4, 6, 8, 30])
@pytest.mark.parametrize("update", ["in_backward", "deferred", "step"])
def test_many_micro_batches_are_predicted_from_a_few(
    megabytes: int, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted(number: int) -> Plan:
        return _plan(_request(num_micro_batches=number, budget_bytes=megabytes << 20, update=update), Traffic())

    counts = (33, 34, 47)
    with monkeypatch.context() as whole:
        whole.setattr(cost_model, "_SIMULATED_CYCLES", 1000)
        wanted = [predicted(number) for number in counts]
    assert [predicted(number) for number in counts] == wanted
    assert predicted(2**60).predicted_read_bytes_per_step >= wanted[0].predicted_read_bytes_per_step
