"""Ranks that divide states update their shares in backward, as the means come: which, and what is an error then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn

import infinity
from infinity.errors import RankError, StepError
from tests.distributed.common import (
    LITTLE,
    WIDTH,
    Deep,
    deep_config,
    input_of,
    require_all_same,
    require_same_everywhere,
    states_of,
    weights_of,
)
from tests.ranks import on_ranks, run_ranks

_TIMEOUT_SECONDS = 60.0


def _config(directory: Path, stage: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return deep_config(directory, stage, {"gradient_clipping": 0} | (changes or {}))


_BF16 = {"bf16": {"enabled": True}}


def _engine(directory: Path, stage: int, changes: dict[str, Any] | None = None) -> Any:
    config = _config(directory, stage, changes)
    engine = infinity.initialize(model=Deep(6, torch.bfloat16 if "bf16" in config else torch.float32), config=config)[0]
    assert engine.config.infinity.update == ("in_backward" if stage else "deferred")
    return engine


def _step(engine: Any, rank: int, number: int, **kwargs: Any) -> None:
    for micro_batch in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_of(rank, 10 * number + micro_batch), **kwargs))
        engine.step()


def _updates_of(engine: Any) -> list[str]:
    """The units of which an update is asked for from now on: filled as it happens."""
    begun: list[str] = []
    submit = engine._parts.stream.submit
    engine._parts.stream.submit = lambda job: (begun.append(job.unit.name), submit(job))[1]
    return begun


_CHANGES: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"gradient_accumulation_steps": 3},
    "bf16": _BF16,
    "little": LITTLE,
    "little-three": {"gradient_accumulation_steps": 3} | LITTLE,
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}},
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("num", "changes"), [(2 + (key == "bf16"), changes) for key, changes in _CHANGES.items()], ids=_CHANGES.keys()
)
@on_ranks()
def test_bits_are_those_of_undivided_states(rank: int, num: int, changes: dict[str, Any], tmp_path: Path) -> None:
    found = {}
    for stage in (0, 1, 2, 3):
        with _engine(tmp_path, stage, changes) as engine:
            norms = {}
            for number in range(4):
                # Once it is one rank's alone: in stage 3 it has to be in memory then.
                takes_expert = number != 2 or rank == 0 or "infinity" in changes
                _step(engine, rank, number, takes_expert=takes_expert)
                norms[f"norm {number}"] = torch.tensor(engine.get_global_grad_norm())
            found[stage] = weights_of(engine) | norms | states_of(engine)
    require_all_same(found)


@pytest.mark.deep
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_updates_begin_before_the_backward_ends(rank: int, stage: int, tmp_path: Path) -> None:
    with _engine(tmp_path, stage) as engine:
        for number in range(4):
            begun = _updates_of(engine)

            def require_begun(begun: list[str] = begun) -> None:
                until = time.monotonic() + _TIMEOUT_SECONDS
                while not begun:
                    assert time.monotonic() < until, "no update has begun"
                    engine._stepper.gradients._advance()
                    time.sleep(0.01)

            engine.module.near_end = require_begun if number else lambda: None  # the first step shows how the loop goes
            _step(engine, rank, number)
            assert sorted(begun) == sorted({*begun}), "a unit was updated twice"


@pytest.mark.deep
@pytest.mark.parametrize("modes", [("in_backward", "in_backward"), ("step", "step"), ("in_backward", "step")])
@on_ranks(2)
def test_weights_are_gathered_in_the_order_of_updates(rank: int, modes: tuple[str, str], tmp_path: Path) -> None:
    own = {"keep_in_memory": False, "update": modes[rank]}
    with infinity.initialize(model=Deep(6), config=_config(tmp_path, 1, {"infinity": own}))[0] as engine:
        exchange, gathered = engine._parts.exchange, list[str]()
        gather = exchange.gather
        exchange.gather = lambda unit: (gathered.append(unit.name), gather(unit))[1]
        for number in range(3):
            begun = _updates_of(engine)
            gathered.clear()
            _step(engine, rank, number)
            assert gathered == begun and len(begun) > 6
            is_in_backward = number > 0 and modes == ("in_backward", "in_backward")
            assert (begun.index("blocks.0") > begun.index("blocks.5")) is is_in_backward, begun


@pytest.mark.deep
@on_ranks(2)
def test_what_only_some_have_waits_for_the_step(rank: int, tmp_path: Path) -> None:
    with _engine(tmp_path, 3) as engine:
        for number in range(3):
            _step(engine, rank, number)
        begun = _updates_of(engine)
        engine.backward(engine(input_of(rank, 9), takes_expert=rank == 0))
        engine._stepper.gradients._finish()
        assert "expert" not in begun
        assert len(begun) >= 6
        engine.step()
        assert "expert" in begun


@pytest.mark.deep
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@on_ranks(2)
def test_vertical_steps_do_so_too(rank: int, num_micro_batches: int, tmp_path: Path) -> None:
    found = {}
    for stage, schedule in ((0, "ordinary"), (2, "vertical"), (3, "vertical")):
        place = {"infinity": {"keep_in_memory": False, "schedule": schedule}}
        with _engine(tmp_path, stage, {"gradient_accumulation_steps": num_micro_batches} | place) as engine:
            for number in range(4):
                batches = ((input_of(rank, 10 * number + each),) for each in range(num_micro_batches))
                begun = _updates_of(engine)
                engine.train_batch(batches)
                assert sorted(begun) == sorted({*begun})
            found[stage] = weights_of(engine) | states_of(engine)
    require_all_same(found)


def _begun(engine: Any, rank: int) -> dict[str, torch.Tensor]:
    """Two steps, and the backward of a third, in which updates begin. Returns the weights before it."""
    for number in range(2):
        _step(engine, rank, number)
    before = weights_of(engine)
    engine.backward(engine(input_of(rank, 99)))
    return before


def _set_rate(engine: Any, value: float) -> None:
    engine.optimizer.param_groups[0]["lr"] = value


@pytest.mark.deep
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda engine, _: (_set_rate(engine, 0.5), engine.step()), StepError),
        (lambda engine, _: engine.optimizer.zero_grad(), StepError),
        (lambda engine, rank: engine(input_of(rank, 5)), StepError),
        (lambda engine, _: engine.optimizer.step(), StepError),
        (lambda engine, _: engine.save_checkpoint("anywhere"), StepError),
        (lambda engine, _: engine.module.state_dict(), StepError),
    ],
    ids=["rate", "drop", "forward", "plain-step", "checkpoint", "weights"],
)
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_what_is_an_error_is_one_on_all_ranks_however_fast(
    rank: int, change: Callable[[Any, int], Any], error: type[Exception], stage: int, tmp_path: Path
) -> None:
    engine = _engine(tmp_path, stage)
    _begun(engine, rank)
    time.sleep(0.3 * rank)  # the last one has not taken part in any exchange that the others could have seen
    with pytest.raises(error):
        change(engine, rank)
    engine.reset()
    require_same_everywhere(weights_of(engine).values())
    engine.optimizer.param_groups[0]["lr"] = 0.01
    _step(engine, rank, 3)
    engine.close()


@pytest.mark.deep
def test_other_rates_on_one_rank_are_named_and_nothing_is_updated(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _engine(tmp_path, 3)
        for number in range(2):
            _step(engine, rank, number)
        _set_rate(engine, 0.01 * (1 + rank))
        begun = _updates_of(engine)
        engine.backward(engine(input_of(rank, 7)))
        try:
            engine.step()
        finally:
            assert not begun
            engine.close(restore_weights=False)

    errors = run_ranks(2, train, tmp_path)
    for error in errors:
        assert "'lr' of group 0 is 0.01 on rank 0, 0.02 on rank 1" in error, error
        assert RankError.__name__ in error


class _CutOffError(Exception):
    pass


@pytest.mark.deep
@pytest.mark.parametrize(("num", "stage"), [(2, 2), (2, 3), (4, 2), (4, 3)])
@on_ranks()
def test_a_backward_cut_off_and_accepted_leaves_the_same_everywhere(
    rank: int, num: int, stage: int, tmp_path: Path
) -> None:
    """Though some have updated what others have not yet averaged."""
    config = _config(tmp_path, stage)
    engine = infinity.initialize(model=Deep(6), config=config)[0]
    for number in range(2):
        _step(engine, rank, number)

    def fail() -> None:
        for _ in range(10 if rank < num / 2 else 0):
            time.sleep(0.05)
            engine._stepper.gradients._advance()
        raise _CutOffError

    engine.module.near_end = fail
    with pytest.raises(_CutOffError):
        engine.backward(engine(input_of(rank, 8)))
    engine.module.near_end = lambda: None
    engine.reset()
    for number in range(2):
        require_same_everywhere((weights_of(engine) | states_of(engine)).values())
        _step(engine, rank, 10 + number)
    engine.close()


@pytest.mark.deep
@on_ranks(2)
def test_ranks_that_are_cut_off_at_other_places_go_on_together(rank: int, tmp_path: Path) -> None:
    """In stage 3 they have gathered other units then, and part."""
    engine = _engine(tmp_path, 2)
    for number in range(2):
        _step(engine, rank, number)

    def fail(*_: Any) -> None:
        raise _CutOffError

    loss = engine(input_of(rank, 8))
    if rank:
        engine.module.near_end = fail
    else:
        loss.register_hook(fail)  # before any unit is complete
    with pytest.raises(_CutOffError):
        engine.backward(loss)
    engine.module.near_end = lambda: None
    engine.reset()
    require_same_everywhere((weights_of(engine) | states_of(engine)).values())
    _step(engine, rank, 10)
    require_same_everywhere(weights_of(engine).values())
    engine.close()


@pytest.mark.deep
@on_ranks(2)
def test_weights_written_while_they_are_gathered(rank: int, tmp_path: Path) -> None:
    found = {}
    for stage in (0, 2, 3):
        with _engine(tmp_path, stage) as engine:
            for number in range(2):
                _step(engine, rank, number)
            gathered = [engine.module.blocks[2][0].weight, engine.module.expert.weight]
            with infinity.GatheredParameters(gathered):
                with torch.no_grad():
                    for parameter in gathered:
                        parameter.mul_(0.5)
                time.sleep(0.5 * rank)  # the other one leaves the block at another moment
            engine.backward(engine(input_of(rank, 5)))
            engine.step()
            found[stage] = weights_of(engine)
    require_all_same(found)


class _Late(nn.Module):
    """A block one of whose parameters gets its gradient last, and only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor, *, takes_late: bool) -> torch.Tensor:
        return x + torch.tanh(self.linear(x + self.late if takes_late else x))


class _LateModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Late() for _ in range(5))

    def forward(self, x: torch.Tensor, *, takes_late: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, takes_late=takes_late)
        return x.square().mean()


def _take_room(gradients: Any, *, until_the_step: bool) -> None:
    """No unit is exchanged in the backward; nor afterwards, before others have to wait for it."""
    has_room = gradients._has_room_beside
    gradients._has_room_beside = lambda grads: not until_the_step and gradients._is_last_over and has_room(grads)


@pytest.mark.deep
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("lacks_room", ["nobody", "until the backward ends", "until the step"])
@on_ranks(2)
def test_a_gradient_that_nobody_expects_is_averaged_once(
    rank: int, clip: float, lacks_room: str, tmp_path: Path
) -> None:
    """One rank hands a unit over without it, and another one later, with it."""
    found = {}
    for stage in (0, 2, 3):
        config = _config(tmp_path, stage, {"gradient_clipping": clip})
        with infinity.initialize(model=_LateModel(), config=config)[0] as engine:
            for number in range(2):
                _step(engine, rank, number)
            if stage and rank and lacks_room != "nobody":
                _take_room(engine._stepper.gradients, until_the_step=lacks_room == "until the step")
            _step(engine, rank, 5, takes_late=True)
            found[stage] = weights_of(engine)
    require_all_same(found)


@pytest.mark.deep
@on_ranks(2)
def test_a_gradient_that_comes_too_late_is_an_error(rank: int, tmp_path: Path) -> None:
    engine = _engine(tmp_path, 2)
    for number in range(2):
        _step(engine, rank, number)
    beside = (engine.module.first.weight * 2).sum()  # whose backward needs no weight
    engine.backward(engine(input_of(rank, 99)))
    beside.backward()
    with pytest.raises(StepError, match=r"first\.weight"):
        engine.step()
    engine.close(restore_weights=False)


@pytest.mark.parametrize("key", ["gradient_clipping", "durable", "deferred", "stage"])
def test_where_updates_wait_for_the_step(key: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "gradient_clipping": {"gradient_clipping": 1.0},
        "durable": {"infinity": {"durable": True}},
        "deferred": {"infinity": {"update": "deferred"}},
        "stage": {"zero_optimization": {"stage": 0}},
    }[key]
    config = infinity.load_config(_config(tmp_path, 3, changes), world_size=2)
    assert config.infinity.update == ("deferred" if key == "stage" else "step")


@pytest.mark.deep
@pytest.mark.parametrize("update", ["in_backward", "deferred", "step"])
@on_ranks(2)
def test_a_step_that_is_cut_off_before_ranks_meet_leaves_no_rank_with_old_weights(
    rank: int, update: str, tmp_path: Path
) -> None:
    """What is in memory then has this rank's new weights and others' old ones."""
    config = _config(tmp_path, 3)
    config["infinity"]["update"] = update
    with infinity.initialize(model=Deep(6), config=config)[0] as engine:
        for number in range(2):
            _step(engine, rank, number)
        stepper = engine._stepper

        def fail() -> None:
            stepper.stream.drain()
            raise _CutOffError

        engine.backward(engine(input_of(rank, 8)))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(_CutOffError):
            patch.setattr("infinity.updates.stepper.gather_weights", lambda cache, units: fail())
            engine.step()
        engine.reset()
        require_same_everywhere([engine(input_of(0, 3)).detach()])
        require_same_everywhere(weights_of(engine).values())
