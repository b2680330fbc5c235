"""Ctrl-C in a training: nothing is half done, nothing is left behind, and training goes on, after a reset if need be."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.checkpoint.training_checkpoint import Saving
from infinity.errors import StepError
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.paging.parameter_cache import ParameterCache
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper
from infinity.updates.stream import UpdateStream
from infinity.vertical.step import StepOptions
from swapper import Handle
from swapper.scheduling.scheduler import IOScheduler
from tests.exactness.lockstep import (
    PLAIN,
    Lockstep,
    engine_on_nvme,
    everything_on_nvme,
    make_batch,
    with_smallest_budget,
)
from tests.open_files import open_files
from tests.twins import Twins
from tests.waiting import wait_until


@contextlib.contextmanager
def _ctrl_c(owner: type, name: str, call: int = 1) -> Iterator[list[str]]:
    """Inside the ``with`` block somebody presses Ctrl-C once, in the main thread's nth call of a method."""
    real, came = getattr(owner, name), []
    num_calls = 0

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += threading.current_thread() is threading.main_thread()
        if num_calls == call and not came:
            came.append(name)
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        try:
            yield came
        finally:
            signal.signal(signal.SIGINT, handler)


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


_BEFORE_STEP: dict[str, tuple[type, str, int]] = {
    "fetch": (ParameterCache, "make_resident", 3),
    "bind": (Unit, "bind", 4),
    "unbind": (Unit, "_unbind", 4),
    "pack": (ParameterCoordinator, "_packed", 5),
    "unpack": (ParameterCoordinator, "_save_in_backward", 3),
    "evict": (ParameterCache, "evict", 2),
    "gradients": (Stepper, "deliver", 1),
    "request": (IOScheduler, "submit", 3),
    "wait": (Handle, "wait", 1),
}
_IN_STEP: dict[str, tuple[type, str, int]] = {
    "first update": (Stepper, "_submit", 1),
    "later update": (Stepper, "_submit", 3),
    "queue": (UpdateStream, "submit", 2),
}
_MODES: dict[str, dict[str, Any]] = {
    "in order": {"gradient_clipping": 0.1},
    "accumulated": {"gradient_clipping": 0.1, "gradient_accumulation_steps": 3},
    "vertical": {"gradient_clipping": 0.1, "gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}},
}


def _step(both: Lockstep, mode: str) -> Callable[[int], None]:
    return both.batch_step if mode == "vertical" else both.engine_step


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("moment", _BEFORE_STEP)
@pytest.mark.parametrize("mode", _MODES)
def test_a_step_that_was_interrupted_before_updates_can_be_reset(mode: str, moment: str, tmp_path: Path) -> None:
    """And training goes on as if nothing had happened; hooks of the user stay up."""
    changes = _MODES[mode] if mode == "vertical" else with_smallest_budget(tmp_path, _MODES[mode])
    with Lockstep.start(tmp_path, changes=changes) as both:
        step = _step(both, mode)
        for number in range(2):
            step(number)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            mine = _top_hooks()
            with _ctrl_c(*_BEFORE_STEP[moment]) as came, contextlib.suppress(KeyboardInterrupt):
                if mode == "vertical":
                    both.engine._vertical.run(
                        [lambda: both.model(**both.batch(77))] * 3, StepOptions(both.engine.global_steps, 3)
                    )
                else:
                    both.engine.backward(both.engine(**both.batch(77)))
            both.engine.reset()
            assert _top_hooks() == mine
        assert came or mode == "vertical"
        assert _top_hooks() is None and torch.is_grad_enabled()
        for number in range(2, 4):
            step(number)
        both.require_equal()


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("moment", _IN_STEP)
@pytest.mark.parametrize("mode", _MODES)
def test_a_step_in_which_an_interrupt_comes_is_ended_before(mode: str, moment: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_MODES[mode]) as both:
        step = _step(both, mode)
        step(0)
        with _ctrl_c(*_IN_STEP[moment]) as came, pytest.raises(KeyboardInterrupt):
            step(1)
        assert came and both.engine.global_steps == 2
        both.reference.step()  # which the interrupt has kept from being called
        step(2)
        both.require_equal()


def test_an_interrupt_right_behind_an_update_in_backward_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are between two steps then, which the next call has to say."""
    submit = Stepper._submit

    def cut_off(*args: Any, **kwargs: Any) -> None:
        submit(*args, **kwargs)
        raise KeyboardInterrupt

    changes = with_smallest_budget(tmp_path, {"infinity": {"update": "in_backward"}})
    with Lockstep.start(tmp_path, changes=changes) as both:
        both.engine_step(0)
        monkeypatch.setattr(Stepper, "_submit", cut_off)
        with pytest.raises(KeyboardInterrupt):
            both.engine.backward(both.engine(**both.batch(1)))
        monkeypatch.undo()
        with pytest.raises(StepError, match=r"after 1 of \d+ units had been updated.*engine.reset\(\)"):
            both.engine.step()
        both.engine.reset()


@pytest.mark.parametrize("then", ["checkpointed", "plain"])
def test_an_interrupt_in_a_checkpoint_around_the_model_leaves_no_hooks(then: str, tmp_path: Path) -> None:
    """torch takes down the innermost hooks when the checkpoint is left, which are the engine's."""

    def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        if then == "plain":
            loss: torch.Tensor = model(**batch)
            return loss
        return checkpoint(lambda: model(**batch), use_reentrant=False)

    model = PLAIN.make("none")
    with Twins(tmp_path, model, is_tight=True) as twins:
        twins.step(lambda model: loss_of(model, make_batch(0)))
        with _ctrl_c(ParameterCache, "make_resident", 3), pytest.raises(KeyboardInterrupt):
            checkpoint(lambda: twins.model(**make_batch(7)), use_reentrant=False)
        with torch.no_grad():  # until the next forward of this model, the checkpoint's own hooks are left
            twins.model(**make_batch(7))
        assert _top_hooks() is None
        for number in range(1, 3):
            twins.step(lambda model, number=number: loss_of(model, make_batch(number)))
        twins.require_equal()
    assert _top_hooks() is None


def test_an_interrupt_in_a_step_of_the_plain_loop_comes_after_it(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, loop="plain") as both:
        both.plain_step(0)
        both.plain_backward(1)
        both.reference.step()
        with _ctrl_c(Stepper, "_submit", 2), pytest.raises(KeyboardInterrupt):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.plain_step(2)
        both.require_equal()


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupt_in_a_save_leaves_the_checkpoint_before_and_the_training(blocking: bool, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    with Lockstep.start(tmp_path / "drive", changes=_MODES["in order"]) as both:
        both.engine_step(0)
        both.engine.save_checkpoint(tmp_path / "saved", tag="before")
        both.engine_step(1)
        with _ctrl_c(Saving, "__init__"), pytest.raises(KeyboardInterrupt):
            both.engine.save_checkpoint(tmp_path / "saved", tag="after", blocking=blocking)
        assert (tmp_path / "saved" / "latest").read_text() == "before"
        both.engine_step(2)
        both.engine.save_checkpoint(tmp_path / "saved", tag="after")
        both.require_equal()


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("moment", [*_BEFORE_STEP, *_IN_STEP])
@pytest.mark.parametrize("mode", ["in order", "vertical"])
def test_whoever_leaves_by_an_interrupt_leaves_nothing(mode: str, moment: str, tmp_path: Path) -> None:
    before, files = set(threading.enumerate()), open_files(tmp_path)

    def train() -> None:
        with engine_on_nvme(tmp_path, PLAIN.make("none"), _MODES[mode]) as engine:
            for step in range(3):
                num = engine.gradient_accumulation_steps()
                with _ctrl_c(*{**_BEFORE_STEP, **_IN_STEP}[moment]) if step == 2 else contextlib.nullcontext():
                    engine.train_batch(iter([make_batch(step, index) for index in range(num)]))

    with contextlib.suppress(KeyboardInterrupt):
        train()
    wait_until(lambda: gc.collect() >= 0 and set(threading.enumerate()) <= before, "the end of threads")
    assert open_files(tmp_path) == files and not os.listdir(tmp_path)
    assert _top_hooks() is None and torch.is_grad_enabled()
    torch.ones(2, requires_grad=True).exp().sum().backward()


@pytest.mark.parametrize(("owner", "name"), [(ParameterCache, "__init__"), (UpdateStream, "__init__"), (Unit, "adopt")])
def test_an_initialize_that_was_interrupted_leaves_the_model_as_it_was(owner: type, name: str, tmp_path: Path) -> None:
    config = everything_on_nvme(tmp_path, {"bf16": {"enabled": True}, "infinity": {"keep_in_memory": True}})
    num_threads, model = threading.active_count(), PLAIN.make("none")
    with _ctrl_c(owner, name), pytest.raises(KeyboardInterrupt):
        infinity.initialize(model=model, config=config)
    for key, value in PLAIN.make("none").state_dict().items():
        found = model.state_dict()[key]
        assert value.dtype == found.dtype and torch.equal(value, found), key
    infinity.initialize(model=model, config=config)[0].close()
    wait_until(lambda: gc.collect() >= 0 and threading.active_count() <= num_threads)
    assert os.listdir(tmp_path) == []
