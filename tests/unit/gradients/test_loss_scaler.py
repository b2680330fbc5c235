"""The loss scale follows the steps as DeepSpeed's does."""

from __future__ import annotations

import pytest
import torch

from infinity.config.resolved import LossScaling
from infinity.errors import StepError
from infinity.gradients.loss_scaler import LossScaler


def _rules(**changes: object) -> LossScaling:
    values: dict[str, object] = {
        "initial": 1024.0,
        "is_dynamic": True,
        "window": 3,
        "hysteresis": 1,
        "refills_hysteresis": False,
        "minimum": 2.0**-20,
    }
    return LossScaling(**{**values, **changes})  # type: ignore[arg-type]


def _follow(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: "." is a finite one, "x" is not."""
    found = []
    for number, step in enumerate(steps):
        scaler.update(is_finite=step == ".", step=number)
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("window", "hysteresis", "refills", "steps", "expected"),
    [
        # The scales that DeepSpeed 0.19.8's DynamicLossScaler has after each step, as binary logarithms.
        (
            3,
            1,
            False,
            "....x......x.xx.......",
            [10, 10, 10, 11, 10, 10, 10, 10, 11, 11, 11, 10, 10, 9, 8, 8, 8, 8, 9, 9, 9, 10],
        ),
        (3, 2, False, "x.x.x.....x.x........", [10, 10, 9, 9, 8, 8, 8, 8, 9, 9, 9, 9, 8, 8, 8, 8, 9, 9, 9, 10, 10]),
        (
            2,
            2,
            True,
            "x.x.xx...x.....x.x.....",
            [10, 10, 10, 10, 10, 9, 9, 9, 10, 10, 10, 10, 11, 11, 12, 12, 12, 12, 12, 12, 13, 13, 14],
        ),
        (1, 1, False, "..x...x..", [10, 11, 10, 10, 11, 12, 11, 11, 12]),
        (
            4,
            3,
            False,
            "xxx....xx.....x..........",
            [10, 10, 9, 9, 9, 9, 9, 8, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10],
        ),
    ],
)
def test_it_is_deepspeeds(window: int, hysteresis: int, refills: bool, steps: str, expected: list[int]) -> None:
    scaler = LossScaler(_rules(window=window, hysteresis=hysteresis, refills_hysteresis=refills))
    assert _follow(scaler, steps) == [2.0**power for power in expected]


def test_the_smallest_scale() -> None:
    scaler = LossScaler(_rules(minimum=300.0))
    assert _follow(scaler, "xx") == [512, 300]
    with pytest.raises(StepError, match=r"gradients of step 2 .*300\.0"):
        scaler.update(is_finite=False, step=2)
    assert _follow(scaler, "....") == [300, 300, 300, 600]


def test_without_zero_it_is_the_rule_of_deepspeeds_own_fp16_optimizer() -> None:
    scaler = LossScaler(_rules(initial=16.0, window=2, hysteresis=2, minimum=1.0), has_zero=False)
    assert _follow(scaler, ".....") == [16, 16, 32, 32, 64], "doubled after the window, not at its end"
    assert _follow(scaler, "xxxxxxxx") == [32, 16, 8, 4, 2, 1, 1, 1], "halved at once, and no error at the minimum"
    assert _follow(scaler, "...x.") == [1, 1, 2, 1, 1]


def test_static_or_none() -> None:
    assert _follow(LossScaler(_rules(is_dynamic=False, initial=7.0)), "xxx....") == [7] * 7
    none = LossScaler(None)
    assert _follow(none, "xx..") == [1] * 4
    assert not none.is_active
    loss = torch.tensor(3.0, dtype=torch.bfloat16)
    assert torch.equal(none.scale_loss(loss, 2), loss / 2)
    scaled = LossScaler(_rules(initial=2.0**40)).scale_loss(torch.tensor(60000.0, dtype=torch.float16), 4)
    assert torch.equal(scaled, torch.tensor(60000.0 / 4 * 2.0**40))
