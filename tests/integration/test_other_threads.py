"""Other threads read weights while one trains; forwards compute in threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.errors import BudgetTooSmallError, ForkedError, StepOrderError, TurnError
from infinity.threads import turn
from tests.exactness.case import Case, loss_of
from tests.exactness.lockstep import Lockstep, make_batch
from tests.exactness.shapes.blocks import Block, Net, token_batch
from tests.forked import require_in_child
from tests.states import state_of

_NAMES = ("blocks.0.up.weight", "blocks.2.down.weight", "head.weight", "embedding.weight")
_MODES: dict[str, dict[str, Any]] = {
    "in backward": {"infinity": {"update": "in_backward"}},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "in memory": {"infinity": {"keep_in_memory": True}},
    "smallest": {"infinity": {"host_memory_budget": "smallest"}},
    "vertical": {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


def _changes(mode: str, directory: Path) -> dict[str, Any]:
    if mode != "smallest":
        return _MODES[mode]
    with pytest.raises(BudgetTooSmallError) as refused:
        Lockstep.start(directory, changes={"infinity": {"host_memory_budget": 1000}})
    return {"infinity": {"host_memory_budget": refused.value.minimum_bytes}}


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


def _averaged(both: Lockstep, name: str) -> Tensor:
    parameter = both.model.get_parameter(name)
    with torch.no_grad():
        return torch.zeros(parameter.shape).lerp_(parameter, 1.0)


_READS: dict[str, Callable[[Lockstep, str], dict[str, Tensor]]] = {
    "clone": lambda both, name: {name: both.model.get_parameter(name).clone().detach()},
    "product": lambda both, name: {name: (both.model.get_parameter(name) * 1).detach()},
    "average": lambda both, name: {name: _averaged(both, name)},
    "state_dict": lambda both, name: both.model.state_dict(),
    "gathered": lambda both, name: {name: _gathered(both, name)},
    "state_of": lambda both, name: {name: state_of(both.engine, both.model.get_parameter(name))["weight"]},
}


@contextmanager
def _beside(function: Callable[[int], None], num_threads: int = 2) -> Iterator[None]:
    """``function(n)`` is called again and again by other threads inside the ``with`` block, which lasts until each was."""
    is_over = threading.Event()
    has_begun = [threading.Event() for _ in range(num_threads)]
    errors: list[BaseException] = []

    def run(index: int) -> None:
        number = index
        while not is_over.is_set() and not errors:
            try:
                function(number)
            except BaseException as error:
                errors.append(error)
            number += num_threads
            has_begun[index].set()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
        for event in has_begun:
            event.wait()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("read", _READS)
def test_other_threads_read_weights_of_whole_steps(read: str, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both:
        snapshots = _Snapshots(both)
        found: list[dict[str, Tensor]] = []
        with _beside(lambda number: found.append(_READS[read](both, _NAMES[number % len(_NAMES)]))):
            for step in range(3):
                (both.batch_step if mode == "vertical" else both.engine_step)(step)
                snapshots.note()
        assert all(map(snapshots.have, found))
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", _MODES)
def test_other_threads_read_states_of_whole_steps(mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both:
        of_reference, keys = both.reference.optimizer, list(range(len(both.optimizer.param_groups[0]["params"])))
        moments: list[dict[int, Tensor]] = []
        found: list[tuple[int, Tensor]] = []

        def note() -> None:
            states = of_reference.state_dict()["state"]
            moments.append({key: states[key]["exp_avg"].clone() for key in keys})

        def read(number: int) -> None:
            state = both.optimizer.state_dict()["state"]
            entry, key = state.get(number % len(keys)), number % len(keys)
            if entry is not None:
                found.append((key, entry["exp_avg"]))

        step = both.batch_step if mode == "vertical" else both.engine_step
        hook = both.optimizer.register_state_dict_pre_hook(lambda _: None)
        step(0)
        note()
        with _beside(read, num_threads=3):
            for number in range(1, 4):
                step(number)
                note()
        assert all(any(torch.equal(value, then[key]) for then in moments) for key, value in found)
        assert len(both.optimizer._optimizer_state_dict_pre_hooks) == 1
        hook.remove()
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("call", ["engine", "model"])
def test_other_threads_evaluate(call: str, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both:
        snapshots = _Snapshots(both)
        found: list[Tensor] = []
        batch = make_batch(99)

        def evaluate(_: int) -> None:
            with torch.no_grad():
                found.append(loss_of(getattr(both, call)(**batch)))

        with _beside(evaluate):
            for step in range(3):
                (both.batch_step if mode == "vertical" else both.engine_step)(step)
                snapshots.note()
        assert all(map(snapshots.have_loss, found))
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("call", ["engine", "model"])
def test_who_waits_for_a_vertical_step_touches_none_of_its_hooks(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 2.0)
    with Lockstep.start(tmp_path, changes=_MODES["vertical"]) as both, ThreadPoolExecutor(1, "other") as pool:
        module_hooks = both.engine._parts.module_hooks
        looks, is_amid = threading.Event(), threading.Event()
        begun: list[Future[Tensor]] = []
        look = module_hooks._compilation

        def is_other() -> bool:
            return threading.current_thread().name.startswith("other")

        def slow_look() -> Any:
            """Slow where another thread looks whether something was compiled: until the step is inside a block."""
            found = look()
            if is_other():
                looks.set()
                is_amid.wait(5)
            return found

        def evaluate() -> Tensor:
            with torch.no_grad():
                return loss_of(getattr(both, call)(**make_batch(99)))

        def until(is_due: Callable[[], bool]) -> None:
            while not (is_due() or both.engine._pager.turn._waiting or begun[0].done()):
                time.sleep(0.001)

        def before_model(*_: Any) -> None:
            if not begun and not is_other():
                begun.append(pool.submit(evaluate))
                until(looks.is_set)

        def before_block(*_: Any) -> None:
            if not is_other():
                is_amid.set()
                until(lambda: False)

        handles = [
            both.model.register_forward_pre_hook(before_model, prepend=True),
            both.model.blocks[1].register_forward_pre_hook(before_block),
        ]
        monkeypatch.setattr(module_hooks, "_compilation", slow_look)
        for step in range(2):
            both.batch_step(step)
            assert both.engine.report.schedule == "vertical"
            if step == 0:
                assert _Snapshots(both).have_loss(begun[0].result())
        for handle in handles:
            handle.remove()
        both.require_equal()


def test_another_thread_has_the_plain_loop_beside_it(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, loop="plain") as both:
        snapshots = _Snapshots(both)
        found: list[dict[str, Tensor]] = []
        with _beside(lambda number: found.append({_NAMES[0]: both.model.get_parameter(_NAMES[0]).clone().detach()})):
            for step in range(3):
                both.plain_step(step)
                snapshots.note()
        assert all(map(snapshots.have, found))
        both.require_equal()


@pytest.mark.deep(but=1)
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


def _pool() -> ThreadPoolExecutor:
    """Threads that compute as the test's own does: torch shares one thread's work by a setting of that thread."""
    return ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))


class InPool(Block):
    """Calls its modules, or what they do, in threads of its own."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        with _pool() as pool:
            normed = pool.submit(self.norm, x).result()
            if self.by_hand:
                up = pool.submit(F.linear, normed, self.up.weight, self.up.bias).result()
                down = pool.submit(lambda: F.gelu(up) @ self.down.weight.t()).result()
            else:
                up = pool.submit(self.up, normed).result()
                down = pool.submit(self.down, F.gelu(up)).result()
        return x + down


class ByHandInPool(InPool):
    by_hand = True


class Branches(Net):
    """Parts of two blocks run side by side, each in a thread, and give two gradients to one tensor."""

    def body(self, x: Tensor) -> Tensor:
        with _pool() as pool:
            left, right = pool.map(lambda block: block.up(x), self.blocks[:2])
        result: Tensor = self.blocks[2](self.blocks[0].down(left * right))
        return result


_FORWARDS: dict[str, Callable[[str], nn.Module]] = {
    "modules": lambda checkpointing: Net(checkpointing, make_block=InPool),
    "operations": lambda checkpointing: Net(checkpointing, make_block=ByHandInPool),
    "branches": Branches,
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("forward", _FORWARDS)
def test_a_forward_with_threads_of_its_own(forward: str, checkpointing: str, tmp_path: Path) -> None:
    if forward == "branches" and checkpointing != "none":
        pytest.skip("torch itself checkpoints nothing across threads")
    kind = Case(forward, lambda _: _FORWARDS[forward](checkpointing), token_batch)
    with Lockstep.start(tmp_path, case=kind) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()


@pytest.mark.deep
def test_many_threads_call_the_model_and_one_sums_their_losses(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both, ThreadPoolExecutor(3) as pool:
        for step in range(2):
            batches = [both.batch(step, index) for index in range(3)]
            expected = sum(both.reference.forward(batch) for batch in batches)
            both.reference.backward(expected)
            both.reference.step()
            losses = list(pool.map(lambda batch: loss_of(both.engine(**batch)), batches))
            loss = sum(losses)
            both.engine.backward(loss)
            both.engine.step()
            both.note(f"loss {step}", torch.as_tensor(expected), torch.as_tensor(loss))
        for name, main in both.reference.main.items():
            torch.testing.assert_close(state_of(both.engine, both.model.get_parameter(name))["weight"], main.detach())


# -------------------------------------------------------------------------------------------------------------- endings


@pytest.mark.deep
def test_a_thread_that_ends_in_the_midst_of_a_forward_has_no_turn(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        handle = both.model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                both.model(**both.batch(1))

        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join()
        handle.remove()
        both.engine_step(1)
        both.require_equal()


def test_nobody_waits_for_ever_for_a_thread_that_waits_for_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.5)
    with Lockstep.start(tmp_path) as both, ThreadPoolExecutor(1) as pool:
        both.engine_step(0)
        with infinity.GatheredParameters(both.model.head.parameters()):
            with pytest.raises(TurnError, match="gathering"):
                pool.submit(both.model.state_dict).result()
            pool.submit(both.model.head.weight.clone).result()
        both.engine_step(1)
        both.require_equal()


def test_a_step_that_is_not_ended_is_told_to_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.5)
    with Lockstep.start(tmp_path, changes=_MODES["in backward"]) as both, ThreadPoolExecutor(1) as pool:
        both.engine_step(0)
        both.engine.backward(loss_of(both.engine(**both.batch(1))))
        weight = both.model.get_parameter(_NAMES[0])
        with pytest.raises(StepOrderError):
            pool.submit(weight.clone).result()
        both.engine.step()
        pool.submit(weight.clone).result()


def test_a_state_dict_that_raises_ends_its_turn(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both, ThreadPoolExecutor(1) as pool:

        def failing(*_: Any) -> None:
            raise LookupError("as asked for")

        handle = both.model.blocks[1].register_state_dict_pre_hook(failing)
        with pytest.raises(LookupError):
            pool.submit(both.model.state_dict).result()
        with pytest.raises(LookupError):
            both.model.state_dict()
        handle.remove()
        both.engine_step(0)
        assert pool.submit(both.model.state_dict).result().keys() == both.reference.model.state_dict().keys()
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in memory", "in backward"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_forked_child_is_told_whose_the_weights_are(is_open: bool, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_MODES[mode]) as both:
        weight = both.model.head.weight

        def is_refused() -> bool:
            for read in (
                weight.clone,
                lambda: both.model(**both.batch(0)),
                lambda: both.engine(**both.batch(0)),
                lambda: both.engine.train_batch(iter([both.batch(0)])),
                both.model.state_dict,
                both.engine.flush,
            ):
                try:
                    read()
                except ForkedError:
                    continue
                return False
            return True

        if is_open:
            with infinity.GatheredParameters([weight]):
                require_in_child(is_refused)
        else:
            require_in_child(is_refused)
        both.engine_step(0)
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["deferred", "vertical"])
def test_a_thread_that_was_cut_off_and_lives_on_has_no_turn(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 2.0)
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both, ThreadPoolExecutor(1) as pool:
        step = both.batch_step if mode == "vertical" else both.engine_step
        step(0)
        for number, kind in enumerate((KeyboardInterrupt, SystemExit, GeneratorExit), start=1):

            def cut_off(*_: Any, kind: type[BaseException] = kind) -> None:
                raise kind

            handle = both.model.blocks[1].register_forward_pre_hook(cut_off)
            for call in (both.model, both.engine):
                with torch.no_grad(), pytest.raises(kind):
                    pool.submit(lambda call=call: call(**make_batch(99))).result()  # type: ignore[misc]
            handle.remove()
            step(number)
            assert not pool.submit(turn.trusts).result()
        both.require_equal()


@pytest.mark.deep
def test_a_guest_that_was_cut_off_and_lives_on_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 2.0)
    with Lockstep.start(tmp_path, changes=_MODES["in backward"]) as both, ThreadPoolExecutor(1) as pool:
        both.engine_step(0)

        def cut_off(*_: Any) -> None:
            raise KeyboardInterrupt

        def come(*_: Any) -> None:
            block = both.model.blocks[2]
            handle = block.up.register_forward_pre_hook(cut_off)
            with pytest.raises(KeyboardInterrupt):
                pool.submit(block, torch.zeros(1, 2, block.up.in_features)).result()
            handle.remove()

        handle = both.model.blocks[0].register_forward_pre_hook(come)
        both.engine_step(1)
        handle.remove()
        both.engine_step(2)
        assert not pool.submit(turn.trusts).result()
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["reset", "error"])
def test_a_guest_beside_a_step_that_is_cut_off_ends_its_own_call(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 5.0)
    mode = "vertical" if ending == "error" else "deferred"
    with Lockstep.start(tmp_path, changes=_changes(mode, tmp_path)) as both, ThreadPoolExecutor(1) as pool:
        step = both.batch_step if mode == "vertical" else both.engine_step
        step(0)
        block, reference = both.model.blocks[2], both.reference.model.blocks[2]
        x = torch.ones(1, 2, block.up.in_features)
        is_inside = threading.Event()
        begun: list[Future[Tensor]] = []

        def linger(*_: Any) -> None:
            if threading.current_thread().name.startswith("ThreadPool"):
                is_inside.set()
                time.sleep(0.5)

        def guest() -> Tensor:
            with torch.no_grad():
                found: Tensor = block(x)
                return found

        def come(*_: Any) -> None:
            begun.append(pool.submit(guest))
            is_inside.wait(5)
            raise LookupError("as asked for")

        handles = [block.up.register_forward_pre_hook(linger), both.model.blocks[0].register_forward_pre_hook(come)]
        with pytest.raises(LookupError):
            if mode == "vertical":
                both.engine.train_batch(iter([both.batch(1, 0), both.batch(1, 1)]))
            else:
                both.engine(**both.batch(1))
        if ending == "reset":
            both.engine.reset()
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            assert all(torch.equal(found.result(), reference(x)) for found in begun)
        step(1)
        both.require_equal()
