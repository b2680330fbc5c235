"""Exceptions, interrupts and drives that fail in the middle of a vertical step: no hang, no thread left, and training on."""

from __future__ import annotations

import _thread
import errno
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import EngineClosedError, StepError
from swapper import SwapperError
from swapper.backend import Direction
from tests.exactness.faulty_drives import faulty_drives
from tests.exactness.lockstep import PLAIN, Lockstep, engine_on_nvme, make_batch
from tests.faults import FaultRule
from tests.waiting import wait_until

_NUM = 3
_VERTICAL: dict[str, Any] = {"gradient_accumulation_steps": _NUM, "infinity": {"schedule": "vertical"}}
_CLIPPED = {**_VERTICAL, "gradient_clipping": 0.1}
_AT_STEP = {**_VERTICAL, "infinity": {"schedule": "vertical", "update": "step"}}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: gc.collect() >= 0 and not any(t.is_alive() for t in threading.enumerate() if t not in before))


def _reference_step(both: Lockstep, step: int) -> None:
    for index in range(_NUM):
        both.reference.backward(both.reference.forward(both.batch(step, index)))
    both.reference.step()


def _step(both: Lockstep, step: int) -> None:
    _reference_step(both, step)
    both.engine.train_batch(iter([both.batch(step, index) for index in range(_NUM)]))


def _without_memory_for_inputs(both: Lockstep) -> None:
    object.__setattr__(both.engine._vertical._on, "activation_bytes", 0)


class Interruption:
    """A hook that raises at its ``number``-th call."""

    def __init__(self, error: BaseException, number: int) -> None:
        self._error: BaseException | None = error
        self._left = number

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0 and self._error is not None:
            error, self._error = self._error, None
            raise error


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("module", "number"), [("embedding", 2), ("blocks.0.up", 3), ("blocks.1", 1), ("head", 2)])
@pytest.mark.parametrize(
    ("error", "changes", "step"),
    [(ValueError("user's fault"), _VERTICAL, 0), (KeyboardInterrupt(), _VERTICAL, 2), (ValueError(), _CLIPPED, 2)],
    ids=["fault-free-0", "interrupt-free-2", "fault-clip-2"],
)
def test_an_exception_in_forward_leaves_everything_as_it_was(
    step: int, module: str, number: int, error: BaseException, changes: dict[str, Any], tmp_path: Path
) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for earlier in range(step):
            _step(both, earlier)
        handle = both.model.get_submodule(module).register_forward_hook(Interruption(error, number))
        if step == 0 and isinstance(error, Exception):
            # The hook raises once: the ordinary order, which is asked what the vertical one failed with, does not fail.
            both.engine.train_batch(iter([both.batch(0, index) for index in range(_NUM)]))
            assert "ValueError: user's fault" in both.engine.report.schedule_reason
            _reference_step(both, 0)
        else:
            with pytest.raises(type(error)):
                both.engine.train_batch(iter([both.batch(77, index) for index in range(_NUM)]))
            assert both.engine.micro_steps == step * _NUM
        handle.remove()
        for later in range(step, step + 3):
            _step(both, later)
        assert both.engine.report.schedule == "vertical"
        both.require_equal()


@pytest.mark.deep
def test_a_fault_of_the_model_is_raised_as_in_the_ordinary_order_and_does_not_count(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_VERTICAL) as both:
        for _ in range(5):
            with pytest.raises(IndexError):
                both.engine.train_batch(
                    iter([{**both.batch(0, i), "tokens": torch.tensor([[99999]])} for i in range(3)])
                )
        for step in range(2):
            _step(both, step)
        assert both.engine.report.schedule == "vertical"
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("changes", [_AT_STEP, _CLIPPED], ids=["update at step", "clip"])
@pytest.mark.parametrize("where", ["blocks.2", "blocks.0", "embedding"])
def test_an_exception_in_backward_before_any_update(where: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            _step(both, step)
        interruption = Interruption(ValueError("user's fault"), 1)

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            output.register_hook(interruption)

        handle = both.model.get_submodule(where).register_forward_hook(hook)
        with pytest.raises(ValueError, match="user's fault"):
            both.engine.train_batch(iter([both.batch(77, index) for index in range(_NUM)]))
        handle.remove()
        for step in range(2, 4):
            _step(both, step)
        both.require_equal()


def test_an_exception_in_backward_after_updates_is_told_and_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.updates.stepper._LEAST_BYTES", 0)  # or small units would wait for each other
    with Lockstep.start(tmp_path, changes=_VERTICAL) as both:
        for step in range(2):
            _step(both, step)
        parameter = both.model.blocks[0].up.weight
        handle = parameter.register_hook(Interruption(ValueError("user's fault"), 2))
        with pytest.raises(ValueError, match="user's fault"):
            both.engine.train_batch(iter([both.batch(2, index) for index in range(_NUM)]))
        handle.remove()
        with pytest.raises(StepError, match="mixture of two steps"):
            both.engine.train_batch(iter([both.batch(2, index) for index in range(_NUM)]))
        both.engine.reset()
        both.engine.train_batch(iter([both.batch(3, index) for index in range(_NUM)]))
        both.engine.flush()


@pytest.mark.deep
@pytest.mark.parametrize("module", ["embedding", "blocks.1", "head"])
def test_a_real_interrupt_while_a_micro_batch_computes(module: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_VERTICAL) as both:
        for step in range(2):
            _step(both, step)
        began = time.monotonic()

        def dawdle(*_: Any) -> None:
            _thread.interrupt_main()
            while time.monotonic() < began + 60:
                time.sleep(0.01)

        handle = both.model.get_submodule(module).register_forward_hook(dawdle)
        with pytest.raises(KeyboardInterrupt):
            both.engine.train_batch(iter([both.batch(77, index) for index in range(_NUM)]))
        assert time.monotonic() < began + 30
        handle.remove()
        for step in range(2, 4):
            _step(both, step)
        both.require_equal()


def test_closing_in_forward_is_an_error_and_no_hang(tmp_path: Path) -> None:
    engine = engine_on_nvme(tmp_path, PLAIN.make("none"), _VERTICAL)
    handle = engine.module.blocks[1].register_forward_hook(lambda *_: engine.close())
    with pytest.raises(Exception):  # noqa: B017 - whatever the closed engine says
        engine.train_batch(iter([make_batch(0, index) for index in range(_NUM)]))
    handle.remove()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.train_batch(iter([make_batch(0, index) for index in range(_NUM)]))


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["vertical", "ordinary"])
@pytest.mark.parametrize("changes", [{}, {"gradient_clipping": 0.05}], ids=["free", "clip"])
def test_too_few_batches_change_nothing(schedule: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = _VERTICAL | changes | {"infinity": {"schedule": schedule}}
    with Lockstep.start(tmp_path, changes=changes) as both:
        _step(both, 0)
        for num_batches in (0, 1, 2):
            with pytest.raises(StopIteration):
                both.engine.train_batch(iter([both.batch(1, index) for index in range(num_batches)]))
            assert both.engine.micro_steps == _NUM
        for step in range(1, 3):
            _step(both, step)
        both.require_equal()


def test_no_room_for_inputs_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity.errors import StorageError
    from tests.internals import EngineResources

    def refuse(self: EngineResources, num_bytes: int) -> Any:
        raise StorageError(tmp_path, f"cannot hold {num_bytes} bytes", cure="Choose another one")

    monkeypatch.setattr(EngineResources, "open_more", refuse)
    with Lockstep.start(tmp_path, changes=_VERTICAL) as both:
        _without_memory_for_inputs(both)
        for step in range(2):
            _step(both, step)
            assert "Choose another one" in both.engine.report.schedule_reason
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("direction", [Direction.WRITE, Direction.READ], ids=lambda direction: direction.name)
def test_a_drive_that_fails_under_the_inputs_of_units(direction: Direction, tmp_path: Path) -> None:
    """The error names what failed, and the step is not done with other inputs."""
    with faulty_drives() as backends, Lockstep.start(tmp_path, changes=_CLIPPED) as both:
        _without_memory_for_inputs(both)
        num_before = len(backends)
        for step in range(2):
            _step(both, step)
            assert both.engine.report.schedule == "vertical"
        (backend,) = backends[num_before:]
        backend.add(FaultRule(direction=direction, nth=3, errno=errno.EIO))
        with pytest.raises(SwapperError, match="'activations'"):
            both.engine.train_batch(iter([both.batch(77, index) for index in range(_NUM)]))
        assert backend.num_faults == 1
        backend.clear()
        both.engine.reset()
        for step in range(2, 4):
            _step(both, step)
        assert both.engine.report.schedule == "vertical"
        both.require_equal()
