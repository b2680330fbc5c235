"""Learning rate schedules against their formulas, written out here step by step."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.config.resolved import SchedulerSection
from infinity.errors import ConfigError
from infinity.optim.lr_schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    find_schedule,
)

NUM_STEPS = 30


def two_groups(cls: type[Optimizer] = AdamW, lrs: tuple[Any, Any] = (1e-3, 2e-3)) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs]
    return cls(groups)  # type: ignore[call-arg]


def run(schedule: LRScheduler, num_steps: int = NUM_STEPS) -> list[list[float]]:
    """The rates of each training step, per group."""
    rates = []
    for _ in range(num_steps):
        rates.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return rates


def warmup(step: int, num_steps: int, kind: str) -> float:
    """Fraction of the warmup in training step `step`: it stands still once, between the first two steps."""
    index = max(0, step - 1)
    if index >= num_steps:
        return 1.0
    return math.log(index + 1) / math.log(num_steps) if kind == "log" else index / num_steps


def _decayed(step: int, kind: str) -> float:
    index = step - 1
    return warmup(step, 6, kind) if index < 6 else max(0.0, (20 - index) / (20 - 6))


def _cosine(step: int, kind: str) -> float:
    index = step - 1
    if step == 0 or index < 5:
        return 0.2 + 0.8 * warmup(step, 5, kind) if step else 0.0
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, (index - 4) / 15))) / 2


_FORMULAS: dict[str, tuple[Callable[[Optimizer, Any], LRScheduler], Callable[[int, Any], float]]] = {
    "WarmupLR": (
        lambda optimizer, kind: WarmupLR(optimizer, 1e-4, 5e-3, 10, kind),
        lambda step, kind: 1e-4 + (5e-3 - 1e-4) * warmup(step, 10, kind),
    ),
    "WarmupDecayLR": (
        lambda optimizer, kind: WarmupDecayLR(optimizer, 20, 1e-5, 4e-3, 6, kind),
        lambda step, kind: 1e-5 + (4e-3 - 1e-5) * _decayed(step, kind),
    ),
    "WarmupCosineLR": (
        lambda optimizer, kind: WarmupCosineLR(optimizer, 20, 0.2, 5, 0.1, kind),
        lambda step, kind: 1e-3 * _cosine(step, kind),
    ),
    "LRRangeTest": (
        lambda optimizer, kind: LRRangeTest(optimizer, 1e-4, 4, 2.0, kind == "log"),
        lambda step, kind: 1e-4 * (1 + 2.0 * (step // 4 if kind == "log" else step / 4)),  # in stairs or not
    ),
}


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("name", _FORMULAS)
def test_rates_follow_their_formula(name: str, kind: str) -> None:
    make, formula = _FORMULAS[name]
    factor = 2 if name == "WarmupCosineLR" else 1  # of each group's own rate
    for step, rates in enumerate(run(make(two_groups(), kind))):
        assert rates == pytest.approx([formula(step, kind), factor * formula(step, kind)], rel=1e-12)


def test_one_value_per_group() -> None:
    schedule = WarmupLR(two_groups(), warmup_min_lr=[1e-6, 2e-6], warmup_max_lr=[3e-3, 4e-3], warmup_num_steps=4)
    rates = run(schedule)
    assert rates[0] == pytest.approx([1e-6, 2e-6])
    assert rates[-1] == pytest.approx([3e-3, 4e-3])
    assert run(WarmupLR(two_groups(), warmup_num_steps=4))[-1] == [1e-3, 2e-3], "each group's own"
    by_length = [run(WarmupLR(two_groups(), warmup_num_steps=length)) for length in (0, 1, 2)]
    assert by_length[0] == by_length[1] == by_length[2], "two steps are the shortest"


def test_one_cycle() -> None:
    optimizer = two_groups()
    momenta = {"cycle_min_mom": 0.7, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1}
    schedule = OneCycle(optimizer, 1e-4, 1e-2, 0.5, 5, 10, decay_step_size=3, **momenta)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        height = step / 5 if step <= 5 else (15 - step) / 10
        if step <= 15:
            rate = 1e-4 + (1e-2 - 1e-4) * height
            momentum = 0.9 - 0.2 * height if step else 0.7
        else:
            rate = 1e-4 / (1 + 0.5 * (step - 15) / 3)
            momentum = 0.9 * (1 + 0.1 * (step - 15) / 3)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate, rel=1e-12)
            assert group["betas"] == pytest.approx((momentum, 0.99), rel=1e-12)
        optimizer.step()
        schedule.step()


def test_one_cycle_in_stairs() -> None:
    stairs = {"cycle_first_stair_count": 3, "cycle_second_stair_count": 2}
    schedule = OneCycle(two_groups(), 0.0, 6.0, cycle_first_step_size=6, **stairs)  # type: ignore[arg-type]
    rates = [first for first, _ in run(schedule, 14)]
    assert rates == pytest.approx([0, 0, 2, 2, 4, 4, 6, 3, 3, 3, 0, 0, 0, 0])


def test_one_cycle_leaves_momentum_alone_when_told_or_without_betas(caplog: pytest.LogCaptureFixture) -> None:
    told = two_groups()
    run(OneCycle(told, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=3, cycle_momentum=False))
    assert told.param_groups[0]["betas"] == (0.9, 0.999)
    assert not caplog.records
    without = two_groups(SGD)
    run(OneCycle(without, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=3))
    assert "betas" not in without.param_groups[0]
    assert "SGD has no betas" in caplog.text


MAKERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, warmup_num_steps=7),
    "WarmupDecayLR": lambda optimizer: WarmupDecayLR(optimizer, 20, warmup_num_steps=7),
    "WarmupCosineLR": lambda optimizer: WarmupCosineLR(optimizer, 20, warmup_num_steps=7),
    "OneCycle": lambda optimizer: OneCycle(optimizer, 1e-4, 1e-2, cycle_first_step_size=6),
    "LRRangeTest": lambda optimizer: LRRangeTest(optimizer, lr_range_test_step_size=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_state_continues_where_it_was_saved(name: str) -> None:
    whole = run(MAKERS[name](two_groups()))
    first = MAKERS[name](two_groups())
    run(first, 11)
    saved = pickle.loads(pickle.dumps((first.state_dict(), first.optimizer.state_dict())))
    optimizer = two_groups()
    second = MAKERS[name](optimizer)
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert run(second, NUM_STEPS - 11) == whole[11:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_takes_deepspeeds_state(name: str) -> None:
    whole = run(MAKERS[name](two_groups()))
    schedule = MAKERS[name](two_groups())
    schedule.load_state_dict({"last_batch_iteration": 10})  # 11 steps are done
    schedule.optimizer.step()
    schedule.step()
    assert [group["lr"] for group in schedule.optimizer.param_groups] == whole[12]


@pytest.mark.parametrize("keyword", [None, "last_batch_iteration", "batch_iteration"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_to_a_batch_is_deepspeeds(name: str, keyword: str | None) -> None:
    """Its `step(n)` says which batch was the last, so the rate is that of step n + 1; without n it goes on from there."""
    whole = run(MAKERS[name](two_groups()))
    schedule: Any = MAKERS[name](two_groups())
    schedule.optimizer.step()
    for batch in (10, 4):
        schedule.step(batch) if keyword is None else schedule.step(**{keyword: batch})
        assert [group["lr"] for group in schedule.optimizer.param_groups] == whole[batch + 1]
    schedule.step()
    assert [group["lr"] for group in schedule.optimizer.param_groups] == whole[6]
    assert schedule.get_last_lr() == whole[6]


@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_that_come_later_are_left_alone(name: str) -> None:
    optimizer = two_groups()
    schedule, alone = MAKERS[name](optimizer), MAKERS[name](two_groups())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5, "betas": (0.1, 0.2)})
    assert [rates[:2] for rates in run(schedule)] == run(alone)
    assert optimizer.param_groups[2]["lr"] == 0.5 and optimizer.param_groups[2]["betas"] == (0.1, 0.2)


def test_tensor_rates_are_written_in_place() -> None:
    optimizer = two_groups(lrs=(torch.tensor(1e-3), torch.tensor(2e-3)))
    tensor = optimizer.param_groups[1]["lr"]
    run(WarmupLR(optimizer, warmup_num_steps=4))
    assert optimizer.param_groups[1]["lr"] is tensor
    assert tensor.item() == pytest.approx(2e-3)


# ---- by name


def test_build_by_name_gives_the_same() -> None:
    built = build_scheduler(
        SchedulerSection("warmupdecaylr", {"total_num_steps": 20, "warmup_num_steps": 7}), two_groups()
    )
    assert type(built) is WarmupDecayLR
    assert run(built) == run(MAKERS["WarmupDecayLR"](two_groups()))


def test_build_in_the_middle() -> None:
    whole = run(WarmupLR(two_groups(), warmup_num_steps=7))
    built = build_scheduler(
        SchedulerSection("WarmupLR", {"warmup_num_steps": 7, "last_batch_iteration": 2}), two_groups()
    )
    assert [group["lr"] for group in built.optimizer.param_groups] == whole[3]


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "LambdaLR", "SequentialLR"])
def test_what_json_cannot_describe_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler.type.*lr_scheduler=lambda optimizer: {name}"):
        find_schedule(name)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup_type": "cosine"}, r"warmup_type' = 'cosine'.*linear"),
        ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps' = -1"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, r"warmup_max_lr.*1 values for 2 parameter groups"),
        ("WarmupDecayLR", {"total_num_steps": math.inf}, r"total_num_steps' = inf"),
        ("WarmupLR", {"last_batch_iteration": "x"}, r"scheduler.params.*takes warmup_min_lr"),
        ("WarmupCosineLR", {}, r"total_num_steps.*missing.*give a number"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("WarmupLR", {"warmup": 3}, r"scheduler.params.*unexpected keyword argument 'warmup'.*takes warmup_min_lr"),
    ],
)
def test_bad_arguments(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_scheduler(SchedulerSection(name, params), two_groups())
