"""Ctrl-C at any point of a step: whoever leaves gets the KeyboardInterrupt and nothing else, and nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import infinity
import swapper
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme, make_batch
from tests.interrupts import Interrupt, is_cut_off, some_of
from tests.waiting import wait_until

_NUM_POINTS = 10
_PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (infinity, swapper))
# What they call that is written in Python and has something to undo.
_BENEATH = tuple(module.__file__ for module in (contextlib, threading, torch.autograd.graph, torch.autograd.grad_mode))


def _is_in_packages(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGES)


def _is_ours(code: CodeType) -> bool:
    return _is_in_packages(code) or code.co_filename in _BENEATH


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _in_order(engine: Any, step: int) -> None:
    engine.backward(engine(**make_batch(step)))
    engine.step()


def _vertically(engine: Any, step: int) -> None:
    engine.train_batch(iter([make_batch(step, index) for index in range(engine.gradient_accumulation_steps())]))
    assert engine.report.schedule == "vertical"


_ORDERS: dict[str, tuple[dict[str, Any], Callable[[Any, int], None]]] = {
    "in_order": ({"gradient_clipping": 0.1}, _in_order),
    "vertically": ({"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}, _vertically),
}


def _leave_by(interrupt: Interrupt, order: str, directory: Path) -> None:
    """Run three steps, the last of them under ``interrupt``, inside ``with engine``."""
    changes, run = _ORDERS[order]
    engine, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(directory, changes))
    with engine:
        for step in range(2):
            run(engine, step)
        with interrupt:
            run(engine, 2)


@pytest.mark.deep
@pytest.mark.parametrize("order", _ORDERS)
def test_whoever_leaves_by_an_interrupt_leaves_nothing(order: str, tmp_path: Path) -> None:
    counted = Interrupt(_is_ours)
    _leave_by(counted, order, tmp_path)
    before = set(threading.enumerate())
    num_interrupts = 0
    for point in some_of(counted.points, _NUM_POINTS):
        interrupt = Interrupt(_is_ours, point)
        num_interrupts += is_cut_off(functools.partial(_leave_by, interrupt, order, tmp_path), interrupt)
        wait_until(
            lambda: gc.collect() >= 0 and set(threading.enumerate()) <= before,
            f"the end of threads after {interrupt.where}",
        )
        assert not _open_files(tmp_path), interrupt.where
        assert _top_hooks() is None and torch.is_grad_enabled(), interrupt.where
        torch.ones(2, requires_grad=True).exp().sum().backward()
    assert num_interrupts > _NUM_POINTS // 2, "nearly all points are passed in every run"


def _open_files(directory: Path) -> list[str]:
    """Of this process, in the directory, without names as they may be."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return [*os.listdir(directory), *(path for path in found if path.startswith(str(directory)))]


_SAVING = {"begin_forward", "end_forward", "push", "pop", "clear_top", "before", "after"}


def _has_to_do_with_saving(code: CodeType) -> bool:
    is_named = code.co_name in _SAVING and code.co_filename.startswith(_PACKAGES)
    return is_named or code.co_filename == torch.autograd.graph.__file__


@pytest.mark.deep
@pytest.mark.parametrize("order", ["forward", "vertically"])
def test_an_interrupt_anywhere_around_the_hooks_for_saved_tensors_leaves_the_users_alone(
    order: str, tmp_path: Path
) -> None:
    """And training goes on as if nothing had happened."""
    num_micro_batches = 1 if order == "forward" else 3
    changes = {
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": 0.1,  # so that nothing is updated before the end
        "infinity": {"schedule": "vertical"},
    }
    with Lockstep.start(tmp_path, changes=changes) as both:

        def run(interrupt: Interrupt) -> None:
            with interrupt:
                if order == "forward":
                    both.engine(**both.batch(77))
                else:
                    losses = both.engine._vertical.run([lambda: both.model(**both.batch(77))] * num_micro_batches)
                    assert isinstance(losses, list), losses

        def train(step: int) -> None:
            for index in range(num_micro_batches):
                both.reference.backward(both.reference.forward(both.batch(step, index)))
            both.reference.step()
            both.engine.train_batch(iter([both.batch(step, index) for index in range(num_micro_batches)]))

        for step in range(2):
            train(step)
        counted = Interrupt(_has_to_do_with_saving)
        run(counted)
        both.engine.reset()
        num_interrupts = 0
        for point in counted.points:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                mine = _top_hooks()
                interrupt = Interrupt(_has_to_do_with_saving, point)
                num_interrupts += is_cut_off(functools.partial(run, interrupt), interrupt)
                both.engine.reset()
                assert _top_hooks() == mine, interrupt.where
            assert _top_hooks() is None, interrupt.where
        assert num_interrupts > 20
        for step in range(2, 4):
            train(step)
        both.require_equal()


def _would_lose_it(code: CodeType) -> bool:
    return code.co_name == "__del__" and _is_ours(code)


def test_no_finalizer_runs_in_a_step(tmp_path: Path) -> None:
    """An interrupt that is delivered in one is lost: autograd lets go of things in the midst of backward."""
    counted = Interrupt(_would_lose_it)
    _leave_by(counted, "in_order", tmp_path)
    assert not counted.points


@pytest.mark.deep
@pytest.mark.parametrize("order", _ORDERS)
def test_a_step_that_was_interrupted_anywhere_can_be_reset(order: str, tmp_path: Path) -> None:
    changes, run = _ORDERS[order]
    engine, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path, changes))
    with engine:
        for step in range(2):
            run(engine, step)
        counted = Interrupt(_is_ours)
        with counted:
            run(engine, 2)
        for point in some_of(counted.points, 24):
            interrupt = Interrupt(_is_ours, point)
            is_cut_off(functools.partial(_step_under, interrupt, run, engine), interrupt)
            engine.reset()
            run(engine, 3)
            engine.flush()
            assert not any("forward" in vars(module) for module in engine.module.modules()), interrupt.where


def _step_under(interrupt: Interrupt, run: Callable[[Any, int], None], engine: Any) -> None:
    with interrupt:
        run(engine, 2)


@pytest.mark.deep
def test_an_initialize_that_was_interrupted_anywhere_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    config = everything_on_nvme(tmp_path, {"bf16": {"enabled": True}})

    def start(model: torch.nn.Module, interrupt: Interrupt) -> None:
        with interrupt:
            engine, *_ = infinity.initialize(model=model, config=config)
        engine.close()

    counted = Interrupt(_is_in_packages)
    start(PLAIN.make("none"), counted)
    expected = PLAIN.make("none").state_dict()
    num_threads = threading.active_count()
    for point in some_of(counted.points, 30):
        model = PLAIN.make("none")
        interrupt = Interrupt(_is_in_packages, point)
        if is_cut_off(functools.partial(start, model, interrupt), interrupt) and "in initialize" not in interrupt.where:
            for name, value in model.state_dict().items():
                assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), interrupt.where
            assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()), interrupt.where
            infinity.initialize(model=model, config=config)[0].close()
    wait_until(lambda: gc.collect() >= 0 and threading.active_count() <= num_threads)
    assert os.listdir(tmp_path) == []
