"""Signal handlers, finalizers and the garbage collector come in at the worst moment: in the midst of a step they are refused."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import swapper
from infinity.errors import EngineBusyError, InfinityError
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.paging.parameter_cache import ParameterCache
from infinity.tiers.weight_store import WeightStore
from infinity.units.unit import Unit
from infinity.updates import stream as update_module
from infinity.updates.stepper import Stepper
from swapper import Swapper, SwapperConfig, SwapperError
from swapper.scheduling.ledger import Ledger
from swapper.scheduling.scheduler import IOScheduler
from tests.exactness.lockstep import PLAIN, Lockstep, engine_on_nvme, take_steps, with_smallest_budget
from tests.waiting import wait_until

# ------------------------------------------------------------------------------------------------- handlers in a step

_MODES: dict[str, dict[str, Any]] = {
    "in_backward": {"infinity": {"update": "in_backward"}},
    "deferred": {"gradient_clipping": 0.1},
    "vertical": {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}},
}


def _run(mode: str, both: Lockstep, step: int) -> None:
    (both.batch_step if mode == "vertical" else both.engine_step)(step)


def _look_at_everything(both: Lockstep, directory: Path) -> list[Exception]:
    """What a handler may do before the machine goes away; returns the errors."""
    with torch.no_grad():
        attempts: list[Callable[[], object]] = [
            lambda: str(both.engine.report) + str(both.engine.plan),
            both.model.state_dict,
            both.engine.flush,
            lambda: both.model(**both.batch(9)),
            lambda: both.engine.save_16bit_model(directory / "out"),
            lambda: [parameter.sum() for parameter in both.model.parameters()],
            lambda: [parameter.grad for parameter in both.model.parameters()],
            both.optimizer.state_dict,
        ]
        errors: list[Exception] = []
        for attempt in attempts:
            try:
                attempt()
            except (InfinityError, SwapperError) as error:
                error.__context__ = None
                errors.append(error.with_traceback(None))  # whose frames would keep weights in memory
    return errors


_MOMENTS: dict[str, tuple[type, str]] = {
    "forward": (ParameterCoordinator, "enter"),
    "fetch": (WeightStore, "fetch"),
    "place": (ParameterCache, "place"),
    "land": (Unit, "on_arrival"),
    "bind": (Unit, "bind"),
    "backward": (ParameterCoordinator, "_save_in_backward"),
    "gradients": (Stepper, "deliver"),
    "step": (Stepper, "_submit"),
    "request": (Ledger, "admit"),
}


def _call_for_each_request(patch: pytest.MonkeyPatch) -> None:
    """Let the scheduler call its own functions, where it does without for the usual request."""
    assert "is_plain" in Ledger.__init__.__code__.co_names  # an attribute of each ledger, not of the class
    patch.setattr(Ledger, "is_plain", property(lambda _: False, lambda *_: None), raising=False)


@contextlib.contextmanager
def _signals(moment: str, handler: Callable[[], None]) -> Iterator[list[str]]:
    """Inside the ``with`` block a signal comes in the main thread's calls of a method, three times, and not inside itself."""
    owner, name = _MOMENTS[moment]
    real, came = getattr(owner, name), []
    num_calls = 0

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if threading.current_thread() is threading.main_thread():
            num_calls += 1
            if num_calls in (1, 4, 6) and not any(each == "inside" for each in came):
                came.append("inside")
                signal.raise_signal(signal.SIGUSR1)
                came[-1] = "came"
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _handling(lambda number, frame: handler()):
        _call_for_each_request(patch)
        patch.setattr(owner, name, method)
        yield came


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("mode", _MODES)
def test_a_handler_in_a_step_is_refused_or_works_and_training_goes_on(mode: str, moment: str, tmp_path: Path) -> None:
    changes = _MODES[mode] if mode == "vertical" else with_smallest_budget(tmp_path, _MODES[mode])
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            _run(mode, both, step)
        errors: list[Exception] = []
        with _signals(moment, lambda: errors.extend(_look_at_everything(both, tmp_path))) as came:
            _run(mode, both, 2)
        assert came or mode == "vertical"
        assert not came or any(isinstance(error, EngineBusyError) and "Set a flag" in str(error) for error in errors)
        _run(mode, both, 3)
        both.require_equal()


def test_a_handler_in_the_users_own_code_may_do_everything(tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(both.model.state_dict())
        both.engine.flush()
        both.engine.save_16bit_model(tmp_path / "out")

    with _handling(handler), Lockstep.start(tmp_path, changes={"gradient_clipping": 0.1}) as both:
        for step in range(3):
            both.engine_step(step)
            signal.raise_signal(signal.SIGUSR1)
            for name, value in both.reference.model.state_dict().items():
                assert torch.equal(seen[-1][name], value), name
        both.require_equal()
    assert len(seen) == 3


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


# ------------------------------------------------------------------------------------------------- handlers in a swapper


# ------------------------------------------------------------------------------------------------- dropped engines


def _dropped_engine(directory: Path) -> None:
    engine = engine_on_nvme(directory, PLAIN.make("none"), {"gradient_clipping": 0.1})
    take_steps(engine, 0, 1)


def _collect_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    """Collect garbage once inside a function, on whichever thread calls it next; returns that thread's name, then."""
    real, threads = getattr(owner, name), []

    def collecting(*args: Any, **kwargs: Any) -> Any:
        if not threads and gc.garbage_is_there:  # type: ignore[attr-defined]
            threads.append(threading.current_thread().name)
            gc.collect()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, collecting)
    return threads


@pytest.mark.parametrize(
    ("owner", "name", "thread"),
    [
        pytest.param(update_module, "flush_denormals", "infinity-update", id="update thread"),
        pytest.param(IOScheduler, "_finish", "swapper-", id="worker under the scheduler's lock"),
    ],
)
def test_an_engine_dropped_while_it_works_is_collected_on_any_thread(
    owner: object, name: str, thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = set(threading.enumerate())
    monkeypatch.setattr(gc, "garbage_is_there", False, raising=False)
    _call_for_each_request(monkeypatch)
    threads = _collect_in(monkeypatch, owner, name)
    gc.disable()
    try:
        _dropped_engine(tmp_path)
        monkeypatch.setattr(gc, "garbage_is_there", True)
        with Lockstep.start(tmp_path, changes={"infinity": {"update": "step"}}) as both:  # gives those threads work
            both.engine_step(0)
            both.engine.flush()
            wait_until(lambda: bool(threads))
            both.require_equal()
    finally:
        gc.enable()
    assert threads[0].startswith(thread)
    # What another thread had in hand at that moment goes with a later collection.
    wait_until(lambda: gc.collect() >= 0 and set(threading.enumerate()) <= before)


def test_a_swapper_a_handle_and_a_staging_pool_that_are_dropped_leave_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = set(threading.enumerate())
    opened = Swapper.open([tmp_path], 1 << 20, SwapperConfig(backend="threads"))
    extent = opened.allocate(1 << 20, "x")
    data = np.ones(1 << 20, dtype=np.uint8)
    opened.write(extent, data)  # the handle is dropped
    opened.read(extent, data).wait()
    staging_pool = swapper.StagingPool(4096, 2)
    staging_buffer = staging_pool.lease()
    del staging_pool, staging_buffer, opened, extent
    wait_until(lambda: gc.collect() >= 0 and set(threading.enumerate()) <= before)
