"""Whether steps go on vertically: asked for, and not failing again and again."""

from __future__ import annotations

from infinity.vertical.eligibility import Suitability


def test_the_third_failure_is_one_too_many() -> None:
    suitability = Suitability("auto", None)
    for _ in range(2):
        suitability.note_failure("a reason")
        assert suitability.reason_against is None
    suitability.note_failure("the last reason")
    assert suitability.reason_against == "the last reason"


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
