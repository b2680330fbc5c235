"""Whether the vertical schedule is worth it, and what is set aside for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.plan.cost_model import best_placement, place_for_schedule, reason_against
from infinity.plan.placement import place
from infinity.plan.sizes import Request, UnitSize
from infinity.units.layout import CHUNK_GRANULE
from tests.unit.plan.planned import request_of

_UNITS = [UnitSize(f"unit {index}", CHUNK_GRANULE * 400, CHUNK_GRANULE * 100, 2, True) for index in range(8)]
_ORDER = [*range(8), *reversed(range(8))]
_REQUEST = request_of(
    record_format=ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT),
    update="deferred",
    num_micro_batches=4,
    keeps_in_memory=False,
)


def _tight(request: Request = _REQUEST) -> Request:
    """With a budget a bit above the least."""
    return dataclasses.replace(request, budget_bytes=place(_UNITS, request).minimum_bytes + (1 << 20))


def test_weights_and_gradients_that_come_and_go_are_worth_it() -> None:
    placement, reason = place_for_schedule("auto", _UNITS, _tight(), _ORDER)
    assert reason is None
    assert placement.activation_bytes > 0


def test_weights_that_stay_in_memory_are_not_worth_it_unless_asked_for() -> None:
    request = dataclasses.replace(_REQUEST, param_tier="none", keeps_in_memory=True)
    placement, reason = place_for_schedule("auto", _UNITS, request, _ORDER)
    assert "hardly any bytes" in (reason or "")
    assert placement == best_placement(_UNITS, request, _ORDER), "and nothing is set aside for inputs"
    placement, reason = place_for_schedule("vertical", _UNITS, request, _ORDER)
    assert reason is None
    assert placement.activation_bytes > 0


def test_beside_a_gpu_sums_of_gradients_are_made_there_however_much_memory_the_host_has() -> None:
    """Else each micro-batch's gradients go down the link, and one thread of the CPU adds them up."""
    request = dataclasses.replace(_REQUEST, uses_host_memory=False, keeps_in_memory=True)
    assert place_for_schedule("auto", _UNITS, request, _ORDER)[1] is None
    assert place_for_schedule("ordinary", _UNITS, request, _ORDER)[1] == "the config asks for it"
    updated_there = dataclasses.replace(request, param_tier="none", optimizer_tier="none", update="step")
    placement, reason = place_for_schedule("auto", _UNITS, updated_there, _ORDER)
    assert placement.gradients_on_device and "hardly any bytes" in (reason or "")


@pytest.mark.parametrize(("asked", "num"), [("ordinary", 4), ("auto", 1)])
def test_the_ordinary_order_gets_the_whole_budget(asked: str, num: int) -> None:
    request = _tight(dataclasses.replace(_REQUEST, num_micro_batches=num))
    placement, reason = place_for_schedule(asked, _UNITS, request, _ORDER)
    expected = "the config asks for it" if asked == "ordinary" else "a step has one micro-batch"
    assert reason == expected
    assert placement == best_placement(_UNITS, request, _ORDER)


@pytest.mark.parametrize("update", ["in_backward", "deferred"])
def test_inputs_take_a_quarter_of_what_the_least_leaves_and_only_of_memory_that_is_shared(update: str) -> None:
    """And gradients take what they take with one micro-batch."""
    request = _tight(dataclasses.replace(_REQUEST, update=update))
    least = place(_UNITS, dataclasses.replace(request, num_micro_batches=1)).minimum_bytes
    placement, _ = place_for_schedule("vertical", _UNITS, request, _ORDER)
    assert placement.activation_bytes == (request.budget_bytes - least) // 4
    smaller = dataclasses.replace(
        request, budget_bytes=request.budget_bytes - placement.activation_bytes, num_micro_batches=1
    )
    assert dataclasses.replace(placement, activation_bytes=0) == best_placement(_UNITS, smaller, _ORDER)
    away = _tight(dataclasses.replace(_REQUEST, uses_host_memory=False))
    assert place_for_schedule("vertical", _UNITS, away, _ORDER)[0].activation_bytes == 0


def test_what_saves_less_than_a_tenth_is_not_worth_computing_everything_once_more() -> None:
    units = [dataclasses.replace(unit, num_states=100) for unit in _UNITS]
    request = dataclasses.replace(_REQUEST, num_micro_batches=2)
    request = dataclasses.replace(request, budget_bytes=place(units, request).minimum_bytes)
    placement = best_placement(units, request, _ORDER)
    assert reason_against("auto", units, request, placement, _ORDER) is not None
    many = dataclasses.replace(request, num_micro_batches=20)
    assert reason_against("auto", units, many, placement, _ORDER) is None
