"""Whether steps go on vertically: asked for, and not failing again and again."""

from __future__ import annotations

import logging

import pytest

from infinity.vertical.eligibility import Suitability


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
