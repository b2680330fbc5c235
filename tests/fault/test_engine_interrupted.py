"""Exceptions and interrupts in a step, and losses that are no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import NonFiniteLossWarning, StepError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import Lockstep

_AT_STEP = {"infinity": {"update": "step"}}
_CLIPPED = {"gradient_clipping": 0.1}


# -------------------------------------------------------------------------------- exceptions in a step


class Interruption:
    """Raises once, where it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def __call__(self, *_: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, _CLIPPED, {"gradient_accumulation_steps": 3}], ids=["free", "clip", "ga3"])
@pytest.mark.parametrize(
    ("error", "step", "module"),
    [
        (ValueError("user's fault"), 0, "blocks.1"),
        (ValueError("user's fault"), 2, "blocks.0.up"),
        (ValueError("user's fault"), 2, "head"),
        (KeyboardInterrupt(), 2, "blocks.2.down"),
    ],
    ids=lambda value: getattr(type(value), "__name__", "") if isinstance(value, BaseException) else str(value),
)
def test_an_exception_in_forward(
    error: BaseException, changes: dict[str, Any], step: int, module: str, tmp_path: Path
) -> None:
    """Nothing was accumulated by that micro-batch; the next call begins afresh, with or without a reset."""
    with Lockstep.start(tmp_path, changes=changes) as both:
        for earlier in range(step):
            both.engine_step(earlier)
        handle = both.model.get_submodule(module).register_forward_hook(Interruption(error))
        with pytest.raises(type(error)):
            both.engine(**both.batch(77))
        handle.remove()
        both.engine_steps(range(step, step + 2))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_an_exception_in_the_forward_of_a_later_micro_batch(micro_batch: int, tmp_path: Path) -> None:
    """What earlier micro-batches accumulated stays."""
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 3}) as both:
        both.engine_step(0)
        for index in range(3):
            batch = both.batch(1, index)
            if index == micro_batch:
                handle = both.model.blocks[1].register_forward_hook(Interruption(RuntimeError()))
                with pytest.raises(RuntimeError):
                    both.engine(**batch)
                handle.remove()
            both.reference.backward(both.reference.forward(batch))
            both.engine.backward(both.engine(**batch))
            both.engine.step()
        both.reference.step()
        both.engine_step(2)
        both.require_equal()


def _raise_in_backward(both: Lockstep, where: str, error: BaseException) -> None:
    """Run one backward that ``error`` cuts off at the gradient of a module's output."""
    interruption = Interruption(error)

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(interruption)

    handle = both.model.get_submodule(where).register_forward_hook(hook)
    loss = both.engine(**both.batch(77))
    handle.remove()
    with pytest.raises(type(error)):
        both.engine.backward(loss)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("error", "changes"),
    [(ValueError("user's fault"), _AT_STEP), (KeyboardInterrupt(), _CLIPPED)],
    ids=["fault-update at step", "interrupt-clip"],
)
@pytest.mark.parametrize("where", ["blocks.2", "blocks.0", "embedding"])
def test_an_exception_in_backward_before_any_update_is_reset(
    error: BaseException, changes: dict[str, Any], where: str, tmp_path: Path
) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        both.engine_step(0)
        _raise_in_backward(both, where, error)
        with pytest.raises(StepError):
            both.engine.step()
        both.engine.reset()
        both.engine_steps((1, 2))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("where", ["blocks.0", "embedding"])
@pytest.mark.parametrize("least_bytes", [0, 1 << 20], ids=["one by one", "together"])
def test_a_backward_cut_off_after_updates_is_never_silent(
    least_bytes: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some units hold new weights and others old ones: whatever comes next says so, or nothing had been updated."""
    monkeypatch.setattr("infinity.updates.stepper._LEAST_BYTES", least_bytes)
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            both.engine_step(step)
        _raise_in_backward(both, where, KeyboardInterrupt())
        with pytest.raises(StepError, match="reset"):  # which is the cure, and not engine.step()
            both.engine(**both.batch(3))
        try:
            both.engine.step()
        except StepError:
            both.engine.reset()
            # Training goes on from the mixture that reset accepts: no crash, no hang, finite losses.
            for step in (3, 4):
                loss = both.engine(**both.batch(step))
                assert torch.isfinite(loss)
                both.engine.backward(loss)
                both.engine.step()
            return
        pytest.fail("engine.step() after a backward that was cut off did not raise")


def test_an_exception_in_a_gradient_hook_of_the_plain_loop(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        handle = both.model.get_parameter("blocks.1.up.weight").register_hook(Interruption(ValueError()))
        loss = loss_of(both.model(**both.batch(77)))
        with pytest.raises(ValueError):
            loss.backward()
        handle.remove()
        both.optimizer.zero_grad()
        both.plain_step(1)
        both.plain_step(2)
        both.require_equal()


def test_a_hook_that_raises_behind_the_update_ends_the_step(tmp_path: Path) -> None:
    """Else the next step would begin with micro-batches of this one counted."""
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 2}) as both:
        handle = both.optimizer.register_step_post_hook(Interruption(ValueError()))
        with pytest.raises(ValueError):
            both.engine_step(0)
        handle.remove()
        both.reference.step()
        both.engine_steps((1, 2))
        assert (both.engine.global_steps, both.engine.micro_steps, both.engine.global_samples) == (3, 6, 6)


# ------------------------------------------------------------------------------------------------- NaN


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("changes", [{}, _CLIPPED])
def test_a_loss_that_is_not_finite_is_reported_with_the_step(
    value: float, changes: dict[str, Any], tmp_path: Path
) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            both.engine_step(step)
        loss = both.engine(**both.batch(2)) * value
        with pytest.warns(NonFiniteLossWarning, match=r"step 2\b.*" + str(value)):
            both.engine.backward(loss)
