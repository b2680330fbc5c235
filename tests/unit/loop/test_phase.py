"""Calls in the wrong phase of the loop are refused with the cure, those in the right one are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import EngineClosedError, StepError
from infinity.loop.phase import Phase, PhaseGuard

_LEGAL = {
    *((Phase.READY, to) for to in (Phase.BACKWARD, Phase.STEPPING, Phase.BROKEN, Phase.CLOSED)),
    *((Phase.BACKWARD, to) for to in (Phase.READY, Phase.BROKEN, Phase.CLOSED)),
    *((Phase.STEPPING, to) for to in (Phase.READY, Phase.BROKEN, Phase.CLOSED)),
    *((Phase.BROKEN, to) for to in (Phase.READY, Phase.CLOSED)),
    (Phase.CLOSED, Phase.CLOSED),
}
_LOSS = torch.ones(())


def _stepper() -> Any:
    return SimpleNamespace(
        gradients=SimpleNamespace(has_any=False),
        is_between_steps=False,
        updated=set(),
        units=[0, 1, 2],
        scaler=SimpleNamespace(is_active=False),
    )


@pytest.fixture
def stepper() -> Any:
    return _stepper()


@pytest.fixture
def guard(stepper: Any) -> PhaseGuard:
    counts: Any = SimpleNamespace(global_steps=7)
    return PhaseGuard(stepper, counts)


@pytest.mark.parametrize(("start", "to"), list(itertools.product(Phase, Phase)))
def test_only_moves_of_the_table_are_made(start: Phase, to: Phase, guard: PhaseGuard) -> None:
    guard.phase = start
    if (start, to) in _LEGAL:
        guard.move_to(to)
        assert guard.phase is to
        assert guard.has_backward == (to is Phase.BACKWARD)
    else:
        with pytest.raises(RuntimeError, match=f"from {start.value} to {to.value}"):
            guard.move_to(to)
        assert guard.phase is start and not guard.has_backward


def test_a_step_needs_a_backward_since_the_last_one_or_gradients(guard: PhaseGuard, stepper: Any) -> None:
    with pytest.raises(StepError, match=r"in step 7: there was no backward since .*engine\.backward\(loss\)"):
        guard.check_step()
    guard.move_to(Phase.BACKWARD)
    guard.move_to(Phase.READY)
    guard.check_step()
    guard.end_micro_batch()
    with pytest.raises(StepError):
        guard.check_step()
    guard.note_backward()
    guard.check_step()
    guard.end_micro_batch()
    stepper.gradients.has_any = True
    guard.check_step()


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.STEPPING])
def test_what_is_cut_off_has_to_be_dropped_first(phase: Phase, guard: PhaseGuard, stepper: Any) -> None:
    guard.move_to(phase)
    guard.cut_off()
    assert guard.phase is Phase.BROKEN and not guard.has_backward and not guard.is_settled
    checks: list[Callable[[], None]] = [
        guard.check_whole,
        guard.check_step,
        lambda: guard.check_backward(_LOSS),
        lambda: guard.check_optimizer_step(is_engine_step=False),
    ]
    for check in checks:
        with pytest.raises(StepError, match=r"engine\.reset\(\) to drop them"):
            check()
    stepper.updated = {1}
    for check in checks:
        with pytest.raises(StepError, match="after 1 of 3 units"):
            check()
    stepper.updated = set()
    guard.move_to(Phase.READY)
    guard.check_whole()
    guard.check_backward(_LOSS)


@pytest.mark.parametrize("phase", [Phase.READY, Phase.BROKEN, Phase.CLOSED])
def test_where_nothing_is_under_way_nothing_is_cut_off(phase: Phase, guard: PhaseGuard) -> None:
    guard.phase = phase
    guard.cut_off()
    assert guard.phase is phase


def test_weights_of_two_steps_are_not_read_stepped_over_or_added_to(guard: PhaseGuard, stepper: Any) -> None:
    guard.check_settled()
    assert guard.is_settled
    stepper.is_between_steps = True
    assert not guard.is_settled
    with pytest.raises(StepError, match="reading weights"):
        guard.check_settled()
    with pytest.raises(StepError, match="already updated in the backward before this one"):
        guard.check_backward(_LOSS)
    with pytest.raises(StepError, match=r"the update already ran in engine\.backward\(\)"):
        guard.check_optimizer_step(is_engine_step=False)
    guard.check_optimizer_step(is_engine_step=True)


def test_only_with_a_loss_scale_is_a_step_of_the_users_own_refused(guard: PhaseGuard, stepper: Any) -> None:
    guard.check_optimizer_step(is_engine_step=False)
    stepper.scaler.is_active = True
    with pytest.raises(StepError, match="with fp16"):
        guard.check_optimizer_step(is_engine_step=False)
    guard.check_optimizer_step(is_engine_step=True)


@pytest.mark.parametrize(
    ("loss", "what"), [(torch.ones(2, 3), r"\(2, 3\)"), (torch.ones(0), r"\(0,\)"), (1.5, "float"), (None, "NoneType")]
)
def test_a_loss_is_a_tensor_with_one_element(loss: Any, what: str, guard: PhaseGuard) -> None:
    with pytest.raises(StepError, match=f"got {what}. Reduce it first"):
        guard.check_backward(loss)
    guard.check_backward(torch.ones(1, 1))


def test_updates_in_backward_are_told_of_where_nothing_may_be_mixed(guard: PhaseGuard, stepper: Any) -> None:
    guard.check_not_partial("something")
    stepper.updated = {0, 2}
    with pytest.raises(StepError, match="step 7: something, after 2 of 3 units"):
        guard.check_not_partial("something")


def test_after_close_nothing_is_open(guard: PhaseGuard) -> None:
    guard.check_open()
    guard.move_to(Phase.CLOSED)
    with pytest.raises(EngineClosedError):
        guard.check_open()


@pytest.mark.parametrize(("phase", "word"), [(Phase.BACKWARD, "backward"), (Phase.STEPPING, "step")])
def test_what_was_cut_off_is_named(phase: Phase, word: str, guard: PhaseGuard) -> None:
    guard.move_to(phase)
    guard.move_to(Phase.BROKEN)
    with pytest.raises(StepError, match=rf"the last {word} was cut off.*engine\.reset\(\)"):
        guard.check_whole()
