"""One call at a time is inside an engine: other threads are told so meanwhile; its settings hold where its work is done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import infinity
from infinity.errors import EngineBusyError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import Lockstep, make_batch, with_smallest_budget
from tests.states import state_of

_NAMES = ("blocks.0.up.weight", "blocks.2.down.weight", "head.weight", "embedding.weight")
_MODES: dict[str, dict[str, Any]] = {
    "in backward": {"infinity": {"update": "in_backward"}},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "in memory": {"infinity": {"keep_in_memory": True}},
    "smallest": {},
    "vertical": {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


def _changes(mode: str, directory: Path) -> dict[str, Any]:
    return with_smallest_budget(directory, {}) if mode == "smallest" else _MODES[mode]


class _Snapshots:
    """What weights and a loss were between the steps, of the reference."""

    def __init__(self, both: Lockstep) -> None:
        self._model = both.reference.model
        self._batch = make_batch(99)
        self.weights: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.note()

    def note(self) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self._model.named_parameters()})
        with torch.no_grad():
            self.losses.append(loss_of(self._model(**self._batch)).clone())

    def have(self, found: dict[str, Tensor]) -> bool:
        return any(all(torch.equal(value, then[name]) for name, value in found.items()) for then in self.weights)

    def have_loss(self, found: Tensor) -> bool:
        return any(torch.equal(found, loss) for loss in self.losses)


def _gathered(both: Lockstep, name: str) -> Tensor:
    parameter = both.model.get_parameter(name)
    with torch.no_grad(), infinity.GatheredParameters([parameter]):
        return parameter.clone()


_READS: dict[str, Callable[[Lockstep, str], dict[str, Tensor]]] = {
    "clone": lambda both, name: {name: both.model.get_parameter(name).clone().detach()},
    "product": lambda both, name: {name: (both.model.get_parameter(name) * 1).detach()},
    "state_dict": lambda both, name: both.model.state_dict(),
    "gathered": lambda both, name: {name: _gathered(both, name)},
    "state_of": lambda both, name: {name: state_of(both.engine, both.model.get_parameter(name))["weight"]},
}


def _evaluated(both: Lockstep, call: str) -> Tensor:
    with torch.no_grad():
        return loss_of(getattr(both, call)(**make_batch(99)))


_USES: dict[str, Callable[[Lockstep], object]] = {
    "clone": lambda both: both.model.head.weight.clone(),
    "open weight": lambda both: both.model.blocks[1].up.weight.clone(),
    "state_dict": lambda both: both.model.state_dict(),
    "gathered": lambda both: _gathered(both, _NAMES[0]),
    "state_of": lambda both: state_of(both.engine, both.model.head.weight),
    "optimizer": lambda both: both.optimizer.state_dict(),
    "module": lambda both: both.model.blocks[1].up(torch.zeros(1, 2, both.model.blocks[1].up.in_features)),
    "model": lambda both: _evaluated(both, "model"),
    "engine": lambda both: _evaluated(both, "engine"),
    "flush": lambda both: both.engine.flush(),
    "step": lambda both: both.engine.step(),
}


def _hooked(both: Lockstep, moment: str, function: Callable[..., None]) -> Any:
    if moment == "forward":
        return both.model.blocks[1].up.register_forward_hook(function)
    if moment == "backward":
        return both.model.blocks[1].register_full_backward_hook(function)
    return both.optimizer.register_step_pre_hook(function)


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("moment", ["forward", "backward", "step", "gathered"])
@pytest.mark.parametrize("mode", _MODES)
def test_other_threads_are_told_while_a_call_is_inside(mode: str, moment: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both, ThreadPoolExecutor(1) as pool:
        step = both.batch_step if mode == "vertical" else both.engine_step
        step(0)
        told: list[str] = []

        def look(*_: Any) -> None:
            for name, use in _USES.items():
                try:
                    pool.submit(use, both).result()
                except EngineBusyError:
                    told.append(name)

        if moment == "gathered":
            with infinity.GatheredParameters([both.model.head.weight]):
                look()
        else:
            handle = _hooked(both, moment, look)
            step(1)
            handle.remove()
        step(2)
        assert told and len(told) % len(_USES) == 0
        both.require_equal()


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("read", _READS)
def test_other_threads_read_and_evaluate_between_calls(read: str, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both, _pool(1) as pool:
        snapshots = _Snapshots(both)
        for step in range(3):
            (both.batch_step if mode == "vertical" else both.engine_step)(step)
            snapshots.note()
            for name in _NAMES:
                assert snapshots.have(pool.submit(_READS[read], both, name).result())
            for call in ("engine", "model"):
                assert snapshots.have_loss(pool.submit(_evaluated, both, call).result())
        both.require_equal()


@pytest.mark.parametrize("multithreading", [True, False])
def test_backward_and_step_in_other_threads_than_forward(multithreading: bool, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        for step in range(2):
            batch = both.batch(step)
            expected = both.reference.forward(batch)
            both.reference.backward(expected)
            both.reference.step()
            loss = loss_of(both.engine(**batch))
            with torch.autograd.set_multithreading_enabled(multithreading):
                one.submit(both.engine.backward, loss).result()
            another.submit(both.engine.step).result()
            both.note(f"loss {step}", expected, loss)
        both.require_equal()


# ------------------------------------------------------------------------------------------------- threads of a forward


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Threads that compute as the test's own does: torch shares one thread's work by a setting of that thread."""
    return ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))


# -------------------------------------------------------------------------------------------------------------- endings


def test_a_state_dict_of_two_steps_is_an_error(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both, ThreadPoolExecutor(1) as pool:
        is_amid, is_over = threading.Event(), threading.Event()

        def linger(*_: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_amid.set()
                assert is_over.wait(60)

        handle = both.model.blocks[1].register_state_dict_pre_hook(linger)
        both.engine_step(0)
        collecting = pool.submit(both.model.state_dict)
        assert is_amid.wait(60)
        both.engine_step(1)
        is_over.set()
        with pytest.raises(EngineBusyError, match="state_dict"):
            collecting.result()
        handle.remove()
        assert pool.submit(both.model.state_dict).result().keys() == both.reference.model.state_dict().keys()
        both.require_equal()


class _Looking(torch.optim.AdamW):
    """Notes in which thread it runs, and what is set there."""

    seen: ClassVar[set[tuple[str, Any]]] = set()

    def step(self, closure: Any = None) -> Any:
        self.seen.add((threading.current_thread().name.rstrip("0123456789"), _settings()))
        return super().step(closure)


def _settings() -> tuple[Any, ...]:
    autocasts = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*autocasts, torch.get_default_device())


_OWN_SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("setting", _OWN_SETTINGS)
@pytest.mark.parametrize("update", ["deferred", "step"])
def test_what_users_set_for_their_thread_is_not_that_of_updates_nor_changed_by_them(
    update: str, setting: str, tmp_path: Path
) -> None:
    changes = {"optimizer": None, "infinity": {"update": update, "update_workers": 2}}
    with Lockstep.start(
        tmp_path,
        changes=changes,
        reference_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=0.1),
        arguments=lambda model: {"optimizer": _Looking(model.parameters(), lr=0.1)},
    ) as both:
        _Looking.seen.clear()  # of the probe
        for step in range(3):
            batch = both.batch(step)
            both.reference.backward(both.reference.forward(batch))
            both.reference.step()
            both.engine.backward(loss_of(both.engine(**batch)))
            with _OWN_SETTINGS[setting]():
                before = _settings()
                both.engine.step()
                both.engine.flush()
                assert _settings() == before
        both.require_equal()
    of_workers = {seen for thread, seen in _Looking.seen if thread.startswith("infinity-update-")}
    assert of_workers == {(False, False, False, torch.device("cpu"))}
