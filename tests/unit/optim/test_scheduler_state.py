"""The state of an lr scheduler goes to one of its kind, and to no other; what cannot be kept is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from infinity.optim.scheduler_state import can_be_kept, scheduler_with, state_of_scheduler


class _Bare:
    """A user's, with nothing but its step."""

    def step(self) -> None:
        pass


class _Derived(StepLR):
    pass


class _Giving(_Bare):
    def state_dict(self) -> dict[str, Any]:
        return {}


def _made(kind: Any, *arguments: int) -> Any:
    return kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), *arguments)


def _put(scheduler: Any, saved: dict[str, Any]) -> None:
    with scheduler_with(scheduler, saved, otherwise="do without"):
        pass


@pytest.mark.parametrize("kind", [StepLR, _Derived])
def test_one_of_the_same_kind_goes_on(kind: type[StepLR]) -> None:
    saved = _made(StepLR, 5)
    saved.optimizer.step()
    saved.step()
    other = _made(kind, 2)
    _put(other, state_of_scheduler(saved))
    assert other.last_epoch == 1 and other.step_size == 5


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda: _made(CosineAnnealingLR, 5), "is a StepLR, and this one a CosineAnnealingLR"),
        (_Giving, "one a _Giving"),
    ],
    ids=["another kind", "a user's"],
)
def test_another_one_is_refused_and_stays(mine: Any, words: str) -> None:
    scheduler = mine()
    before = repr(scheduler.state_dict())
    with pytest.raises(ValueError, match=rf"{words}: pass the one of that run to infinity\.initialize, or do without"):
        _put(scheduler, state_of_scheduler(_made(StepLR, 5)))
    assert repr(scheduler.state_dict()) == before
    with pytest.raises(
        ValueError, match="has no load_state_dict: pass the one of that run"
    ):  # written before classes were
        _put(_Bare(), {"lr_scheduler": {}})


def test_what_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert [can_be_kept(each) for each in (_Bare(), _Giving(), _made(StepLR, 5))] == [False, False, True]
    with caplog.at_level(logging.WARNING):
        _put(_Bare(), state_of_scheduler(_Bare()))
        _put(None, state_of_scheduler(_made(StepLR, 5)))
        _put(None, state_of_scheduler(None))
    one, two = (each.getMessage() for each in caplog.records)
    assert "this _Bare goes on as it is" in one and "(StepLR) was saved, and there is none now" in two
