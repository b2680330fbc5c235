"""A request may end long after whoever waited for it has gone. Until then its memory belongs to nobody else."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.gradients.store import GradientStore
from infinity.updates.job import UpdateJob
from infinity.updates.stream import UpdateStream
from infinity.vertical.step import StepOptions
from swapper import (
    ALIGNMENT,
    AlignedRegion,
    Direction,
    StagingExhaustedError,
    StagingPool,
    StallError,
    Swapper,
    SwapperConfig,
)
from swapper.backend import IOBackend
from swapper.scheduling.scheduler import IOScheduler
from tests.exactness.faulty_drives import wrapped_drives
from tests.exactness.lockstep import Lockstep, with_smallest_budget
from tests.manual_backend import ManualBackend
from tests.unit.late_backend import LateBackend, await_hand_over, stall, waits

_BLOCK = ALIGNMENT
_CONFIG = SwapperConfig(request_bytes=_BLOCK, deadline_seconds=1000.0)


# ----------------------------------------------------------------------------------------------- memory that is leased


def _swapper() -> tuple[Swapper, ManualBackend, Any]:
    backend = ManualBackend(64 * _BLOCK)
    swapper = Swapper(backend, _CONFIG)
    extent = swapper.allocate(16 * _BLOCK, "x")
    swapper.write(extent, torch.full((16 * _BLOCK,), 7, dtype=torch.uint8))
    backend.complete_all()
    return swapper, backend, extent


@pytest.mark.off_main_thread
@pytest.mark.parametrize("direction", Direction)
def test_a_page_is_lent_again_when_the_backend_has_let_go_of_it(direction: Direction) -> None:
    swapper, backend, extent = _swapper()
    with StagingPool(_BLOCK, 1) as staging_pool, swapper:
        with staging_pool.lease() as staging_buffer:
            handle = getattr(swapper, direction.name.lower())(extent, staging_buffer.tensor)
            with pytest.raises(StallError):
                handle.wait(0.0)
        assert staging_buffer.is_released
        assert staging_pool.try_lease() is None
        with pytest.raises(StagingExhaustedError, match="transfers that have not ended"):
            staging_pool.lease(0.0)
        assert staging_pool.num_leased == 1
        stall(swapper._scheduler)
        assert handle.done() and staging_pool.try_lease() is None
        backend.complete_all()
        assert staging_pool.num_leased == 0
        staging_pool.lease(0.0).release()


def test_the_same_holds_where_no_handle_was_ever_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the midst of a submission: some of its transfers are under way."""
    real = IOScheduler._submit_all

    def interrupted(self: Any, taken: Any) -> None:
        real(self, taken)
        raise KeyboardInterrupt

    backend = ManualBackend(64 * _BLOCK)
    with StagingPool(4 * _BLOCK, 1) as staging_pool, Swapper(backend, _CONFIG) as swapper:
        extent = swapper.allocate(16 * _BLOCK, "x")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), staging_pool.lease() as staging_buffer:
            patch.setattr(IOScheduler, "_submit_all", interrupted)
            swapper.write(extent, staging_buffer.tensor)
        assert staging_pool.try_lease() is None
        await_hand_over(swapper._scheduler)
        backend.complete_all()
        assert staging_pool.try_lease() is not None


def test_a_page_that_nobody_can_give_back_any_more_comes_back() -> None:
    with StagingPool(_BLOCK, 2) as staging_pool:
        staging_buffers = [staging_pool.lease(), staging_pool.lease()]
        view = staging_buffers[0].tensor[:10].view(torch.int16)
        staging_buffers.clear()
        assert staging_pool.num_leased == 1, "somebody has a view"
        del view
        staging_pool.lease(0.0)


@pytest.mark.off_main_thread
@pytest.mark.parametrize("direction", Direction)
def test_a_flat_buffer_is_handed_out_again_when_the_backend_has_let_go_of_it(direction: Direction) -> None:
    swapper, backend, extent = _swapper()
    pool = FlatPool(ComputeDevice(), 2 * _BLOCK)
    with swapper:
        flat = pool.allocate(_BLOCK)
        handle = getattr(swapper, direction.name.lower())(extent, flat.tensor())
        address = flat.address
        pool.release(flat)
        pool.release(flat)
        assert pool.used_bytes == _BLOCK, "it counts as used"
        assert pool.allocate(2 * _BLOCK) is None
        other = pool.allocate(_BLOCK)
        assert other is not None and other.address != address
        assert pool.awaits_requests(), "it will be over soon"
        stall(swapper._scheduler)
        with pytest.raises(StallError) as raised:
            pool.awaits_requests()
        assert raised.value is handle.error
        backend.complete_all()
        assert pool.reclaim() and not pool.awaits_requests()
        again = pool.allocate(_BLOCK)
        assert again is flat


def test_a_flat_buffer_that_nobody_can_give_back_any_more_comes_back() -> None:
    pool = FlatPool(ComputeDevice(), _BLOCK)
    assert pool.allocate(_BLOCK) is not None
    assert pool.allocate(_BLOCK) is None
    assert pool.reclaim()
    assert pool.allocate(_BLOCK) is not None


@pytest.mark.off_main_thread
def test_memory_is_not_discarded_under_a_request_nor_where_it_is_registered() -> None:
    swapper, backend, extent = _swapper()
    with swapper:
        region = AlignedRegion(4 << 20)
        swapper.write(extent, region.array()[:_BLOCK])
        assert region.discard(2 << 20) == 0
        backend.complete_all()
        region.registrations.add(swapper)
        assert region.discard(2 << 20) == 0
        region.registrations.discard(swapper)
        assert region.discard(2 << 20) == 2 << 20


# ------------------------------------------------------------------------------------------------------------ training


@contextlib.contextmanager
def _late_training(directory: Path, changes: dict[str, Any]) -> Iterator[tuple[Lockstep, list[LateBackend]]]:
    """Everything on a drive that answers late, at the smallest budget."""
    backends: list[LateBackend] = []

    def wrap(inner: IOBackend) -> IOBackend:
        backends.append(LateBackend(inner))
        return backends[-1]

    own = {**changes.get("infinity", {}), "io_deadline_seconds": 1000}
    smallest = with_smallest_budget(directory, {**changes, "infinity": own})
    with wrapped_drives(wrap), Lockstep.start(directory, changes=smallest) as both:
        yield both, backends
        for backend in backends:
            backend.answer_all()


def after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        first()
        return function(*args)

    return both


_ACCUMULATED = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.1}


_VERTICALLY = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.1, "infinity": {"schedule": "vertical"}}
_AT_STEP = {"infinity": {"update": "step"}}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    "changes",
    [{"gradient_clipping": 0.1}, _AT_STEP, _ACCUMULATED, _VERTICALLY],
    ids=["clip", "at step", "accumulation", "vertical"],
)
def test_a_wait_that_is_cut_off_anywhere_leaves_nothing_to_others(
    changes: dict[str, Any], error: type[BaseException], tmp_path: Path
) -> None:
    """Whatever the training thread reads is under way until it waits for it. At the nth wait comes an interrupt or an error;
    what is under way then answers at any later moment."""
    dice = random.Random(0)
    is_vertical = changes is _VERTICALLY
    with _late_training(tmp_path, changes) as (both, backends):
        num_waits = 0
        cut_off_at = -1

        def answer_all() -> None:
            for backend in backends:
                backend.answer_all()

        def on_wait(scheduler: Any, operation: Any) -> None:
            nonlocal num_waits
            if threading.current_thread() is not threading.main_thread():
                return answer_all()
            num_waits += 1
            if num_waits == cut_off_at:
                raise error
            for backend in backends:
                for request in list(backend.kept):
                    is_mine = request.operation is operation or operation.state.name != "RUNNING"
                    if request in backend.kept and (is_mine or dice.random() < 0.2):
                        backend.answer(backend.kept.index(request))
            return None

        def train(step: int) -> None:
            if is_vertical:
                losses = both.engine._vertical.run([lambda: both.model(**both.batch(step))] * 3, StepOptions(0, 3))
                assert isinstance(losses, list), losses
                return
            for index in range(both.engine.gradient_accumulation_steps()):
                both.engine.backward(both.engine(**both.batch(step, index)))
                if index + 1 < both.engine.gradient_accumulation_steps():
                    both.engine.step()

        def train_both(step: int) -> None:
            if not is_vertical:
                both.engine_step(step)
                return
            for index in range(3):
                both.reference.backward(both.reference.forward(both.batch(step, index)))
            both.reference.step()
            both.engine.train_batch(iter([both.batch(step, index) for index in range(3)]))

        with waits(on_wait), pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (FlatPool, "awaits_requests"),
                (GradientStore, "_await_memory_use"),
                (UpdateJob, "wait"),
                (UpdateStream, "drain"),
            ):
                patch.setattr(owner, name, after(answer_all, getattr(owner, name)))
            train_both(0)
            train_both(1)
            for backend in backends:
                backend.is_late = lambda request: request.direction is Direction.READ
            num_cut_off = 0
            for nth in range(1, 11):
                num_waits, cut_off_at = 0, nth
                try:
                    train(77)
                except error:
                    num_cut_off += 1
                cut_off_at = -1
                both.engine.reset()
                if nth % 5 == 0:
                    train_both(1 + nth)
            for backend in backends:
                backend.is_late = lambda request: False
            answer_all()
        assert num_cut_off > 3
        both.require_equal()
