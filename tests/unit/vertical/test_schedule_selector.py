"""Whether steps go on vertically: asked for, and not failing again and again."""

from __future__ import annotations

from infinity.vertical.schedule_selector import ScheduleSelector


def test_the_third_failure_is_one_too_many() -> None:
    selector = ScheduleSelector("auto", None)
    for _ in range(2):
        selector.on_failure("a reason")
        assert selector.reason_against is None
    selector.on_failure("the last reason")
    assert selector.reason_against == "the last reason"


def test_ten_successes_make_up_for_a_failure() -> None:
    selector = ScheduleSelector("vertical", None)
    for _ in range(10):
        selector.on_success()
    for _ in range(3):
        selector.on_failure("a reason")
    assert selector.reason_against is None and selector.is_expected
    selector.on_failure("a reason")
    assert selector.reason_against == "a reason" and not selector.is_expected


def test_a_failure_that_the_ordinary_order_shares_does_not_count() -> None:
    selector = ScheduleSelector("auto", None)
    for _ in range(3):
        selector.on_failure("an error of the model's own")
    assert selector.reason_against is not None
    selector.forgive()
    assert selector.reason_against is None
    selector.forgive()  # that is of the last failure only
    selector.on_failure("a reason")
    assert selector.reason_against == "a reason"
