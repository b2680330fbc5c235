"""Whether steps go vertically: asked for, worth it, and not failing again and again."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.planning.cost_model import best_placement
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import place
from infinity.units.layout import CHUNK_GRANULE
from infinity.vertical.eligibility import Suitability, place_for_schedule, reason_against

_UNITS = [UnitSize(f"unit {index}", CHUNK_GRANULE * 400, CHUNK_GRANULE * 100, 2, True) for index in range(8)]
_ORDER = [*range(8), *reversed(range(8))]
_REQUEST = Request(
    budget_bytes=1 << 40,
    device_budget_bytes=None,
    param_tier="nvme",
    optimizer_tier="nvme",
    record_format=ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT),
    shares_host_memory=True,
    update="deferred",
    num_micro_batches=4,
    page_bytes=None,
    prefetches=True,
    can_spill=True,
    keeps_in_memory=False,
)


def _tight(request: Request = _REQUEST) -> Request:
    """With a budget a bit above the least."""
    return dataclasses.replace(request, budget_bytes=place(_UNITS, request).minimum_bytes + (1 << 20))


# ------------------------------------------------------------------------------------------------------- before the first step


def test_weights_and_gradients_that_come_and_go_are_worth_it() -> None:
    placement, suitability = place_for_schedule("auto", _UNITS, _tight(), _ORDER)
    assert suitability.reason_against is None
    assert placement.activation_bytes > 0


def test_weights_that_stay_in_memory_are_not_worth_it_unless_asked_for() -> None:
    request = dataclasses.replace(_REQUEST, param_tier="none", keeps_in_memory=True)
    placement, suitability = place_for_schedule("auto", _UNITS, request, _ORDER)
    assert "hardly any bytes" in (suitability.reason_against or "")
    assert placement == best_placement(_UNITS, request, _ORDER, len(_UNITS)), "and nothing is set aside for inputs"
    placement, suitability = place_for_schedule("vertical", _UNITS, request, _ORDER)
    assert suitability.reason_against is None and suitability.is_expected
    assert placement.activation_bytes > 0


@pytest.mark.parametrize(("asked", "num"), [("ordinary", 4), ("auto", 1)])
def test_the_ordinary_order_gets_the_whole_budget(asked: str, num: int) -> None:
    request = _tight(dataclasses.replace(_REQUEST, num_micro_batches=num))
    placement, suitability = place_for_schedule(asked, _UNITS, request, _ORDER)
    expected = "the config asks for it" if asked == "ordinary" else "a step has one micro-batch"
    assert suitability.reason_against == expected and not suitability.is_expected
    assert placement == best_placement(_UNITS, request, _ORDER, len(_UNITS))


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
    assert dataclasses.replace(placement, activation_bytes=0) == best_placement(_UNITS, smaller, _ORDER, len(_UNITS))
    away = _tight(dataclasses.replace(_REQUEST, shares_host_memory=False))
    assert place_for_schedule("vertical", _UNITS, away, _ORDER)[0].activation_bytes == 0


def test_one_micro_batch_saves_nothing() -> None:
    request = _tight(dataclasses.replace(_REQUEST, num_micro_batches=1))
    placement = best_placement(_UNITS, request, _ORDER, len(_UNITS))
    assert reason_against("auto", _UNITS, request, placement, _ORDER) is not None
    assert reason_against("vertical", _UNITS, request, placement, _ORDER) is None
    several = dataclasses.replace(request, num_micro_batches=2)
    assert reason_against("auto", _UNITS, several, placement, _ORDER) is None


def test_what_saves_less_than_a_tenth_is_not_worth_computing_everything_once_more() -> None:
    units = [dataclasses.replace(unit, num_states=100) for unit in _UNITS]
    request = dataclasses.replace(_REQUEST, num_micro_batches=2)
    request = dataclasses.replace(request, budget_bytes=place(units, request).minimum_bytes)
    placement = best_placement(units, request, _ORDER, len(units))
    assert reason_against("auto", units, request, placement, _ORDER) is not None
    many = dataclasses.replace(request, num_micro_batches=20)
    assert reason_against("auto", units, many, placement, _ORDER) is None


# ---------------------------------------------------------------------------------------------------------- step by step


def test_the_third_failure_is_one_too_many() -> None:
    suitability = Suitability("auto", None)
    for _ in range(2):
        suitability.note_failure("a reason")
        assert suitability.reason_against is None
    suitability.note_failure("the last reason")
    assert suitability.reason_against == "the last reason"


def test_a_failure_that_lasts_is_one_too_many() -> None:
    suitability = Suitability("auto", None)
    suitability.note_failure("a reason", is_final=True)
    assert suitability.reason_against == "a reason"


@pytest.mark.parametrize(("asked", "messages"), [("vertical", ["differ", "other"]), ("auto", [])])
def test_differences_are_for_whoever_asks_for_them(
    asked: str, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    suitability = Suitability(asked, None)
    with caplog.at_level(logging.INFO, logger="infinity"):
        for what in ("differ", "other", "differ"):
            assert suitability.note_difference(what) is (asked == "vertical")
    assert [record.message.rsplit(" ", 1)[1] for record in caplog.records] == messages


def test_ten_successes_make_up_for_a_failure() -> None:
    suitability = Suitability("vertical", None)
    for _ in range(10):
        suitability.note_success()
    for _ in range(3):
        suitability.note_failure("a reason")
    assert suitability.reason_against is None and suitability.is_expected
    suitability.note_failure("a reason")
    assert suitability.reason_against == "a reason" and not suitability.is_expected


def test_a_failure_that_the_ordinary_order_shares_does_not_count() -> None:
    suitability = Suitability("auto", None)
    for _ in range(3):
        suitability.note_failure("an error of the model's own")
    assert suitability.reason_against is not None
    suitability.forgive()
    assert suitability.reason_against is None
    suitability.forgive()  # that is of the last failure only
    suitability.note_failure("a reason")
    assert suitability.reason_against == "a reason"


def test_what_was_against_it_from_the_beginning_stays_so() -> None:
    suitability = Suitability("vertical", "no")
    suitability.forgive()
    assert suitability.reason_against == "no" and not suitability.is_expected
    assert Suitability("ordinary", None).reason_against == "the config asks for it"
    assert not Suitability("auto", None).is_expected, "it may or may not"


def test_the_next_step_needs_less_watching_after_a_success_and_not_after_a_failure() -> None:
    suitability = Suitability("auto", None)
    assert not suitability.is_proven
    suitability.note_success()
    assert suitability.is_proven
    suitability.note_failure("a reason")
    assert not suitability.is_proven
    suitability.note_success()
    assert suitability.is_proven


@pytest.mark.parametrize(("asked", "level"), [("vertical", logging.WARNING), ("auto", logging.INFO)])
def test_each_reason_is_told_once(asked: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    suitability = Suitability(asked, None)
    with caplog.at_level(logging.INFO, logger="infinity"):
        for reason in ("one", "other", "one"):
            suitability.note_failure(reason)
    assert [record.levelno for record in caplog.records] == [level] * 2
    assert [record.message.rsplit(" ", 1)[1] for record in caplog.records] == ["one", "other"]
