"""What a user of `initialize` and of the engine's loop was promised, besides exact training; and the ready-made configs."""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, InfinityError, StepError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import PLAIN, Lockstep, engine_on_nvme, everything_on_nvme, make_batch
from tests.exactness.paged import paged_snapshot
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch


def test_initialize_returns_four_and_holds_the_model_it_was_given(tmp_path: Path) -> None:
    model = PLAIN.make("none")
    params = list(model.parameters())
    engine, optimizer, loader, scheduler = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
        assert engine.module is model
        assert loader is None
        assert scheduler is None
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert engine.global_steps == 0
    assert os.listdir(tmp_path) == []


def test_one_config_only(tmp_path: Path) -> None:
    config, path = everything_on_nvme(tmp_path), tmp_path / "other.json"
    args = argparse.Namespace(deepspeed_config=str(path))
    for given in ({"config": config}, {"config_params": str(tmp_path / "third.json")}):
        with pytest.raises(ConfigError, match=r"two configs: .* and args.deepspeed_config \('.*other.json'\)"):
            infinity.deepspeed.initialize(args, PLAIN.make("none"), **given)
    path.write_text(json.dumps(config))
    engine, *_ = infinity.deepspeed.initialize(args, PLAIN.make("none"), config=path)
    engine.close()


def test_numbers_that_a_library_would_have_put_in(tmp_path: Path) -> None:
    def begin(rate: float | str, num_steps: int | str, **arguments: Any) -> None:
        blocks = {
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": num_steps}},
        }
        engine_on_nvme(tmp_path, nn.Linear(4, 4), blocks, **arguments).close()

    with pytest.raises(ConfigError, match=r"optimizer.params.lr.*Write a number, or pass optimizer="):
        begin("auto", 10)
    with pytest.raises(ConfigError, match=r"scheduler.params.warmup_num_steps.*or pass lr_scheduler="):
        begin(1e-3, "auto")
    begin("auto", 10, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    begin(1e-3, "auto", lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer))


@pytest.mark.deep
def test_evaluation_with_grad_enabled_leaves_no_trace(tmp_path: Path) -> None:
    """Somebody who forgets no_grad wastes memory and nothing else."""
    with Lockstep.start(tmp_path) as both:
        for step in range(3):
            both.model.eval()
            both.reference.model.eval()
            expected = both.reference.forward(both.batch(step + 30))
            both.note(f"evaluation {step}", expected, both.engine(**both.batch(step + 30)))
            both.model.train()
            both.reference.model.train()
            both.engine_step(step)
        both.require_equal()


def test_a_step_left_out_after_an_update_in_backward_is_an_error(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine.backward(both.engine(**both.batch(1)))
        with pytest.raises(StepError, match="step"):
            both.engine.backward(both.engine(**both.batch(2)))


def test_a_loss_that_is_no_scalar_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        with pytest.raises(InfinityError, match="one element"):
            both.engine.backward(torch.ones(3, requires_grad=True))
        both.engine_step(0)
        both.require_equal()


@pytest.mark.deep
def test_the_configs_schedule_steps_with_the_engine(tmp_path: Path) -> None:
    params = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    section = {"type": "WarmupLR", "params": params}
    with Lockstep.start(tmp_path, changes={"scheduler": section, "gradient_accumulation_steps": 2}) as both:
        assert isinstance(both.scheduler, torch.optim.lr_scheduler.LRScheduler)
        schedule = infinity.schedules.WarmupLR(both.reference.optimizer, **params)
        seen = []
        for step in range(4):
            seen.append(both.engine.get_lr()[0])
            both.engine_step(step)
            schedule.step()
            assert both.engine.get_lr() == [group["lr"] for group in both.reference.param_groups]
        assert len(set(seen)) >= 3, "the rate moves from step to step"
        both.require_equal()


def test_a_schedule_that_raises_leaves_whole_steps(tmp_path: Path) -> None:
    class Failing:
        fails = True

        def step(self) -> None:
            if self.fails:
                raise RuntimeError("the schedule failed")

    schedule = Failing()
    changes = {"gradient_accumulation_steps": 2}
    with Lockstep.start(tmp_path, changes=changes, arguments=lambda _: {"lr_scheduler": schedule}) as both:
        with pytest.raises(RuntimeError, match="the schedule failed"):
            both.engine_step(0)
        schedule.fails = False
        assert (both.engine.global_steps, both.engine.micro_steps) == (1, 2)


def test_a_schedule_that_needs_more_is_named_before_the_step(tmp_path: Path) -> None:
    class Timed:
        epoch = 0

        def step(self, epoch: int, metric: float) -> None:
            self.epoch = epoch

    schedule = Timed()
    with Lockstep.start(tmp_path, arguments=lambda _: {"lr_scheduler": schedule}) as both:
        both.engine.backward(loss_of(both.engine(**both.batch(0))))
        with pytest.raises(TypeError, match=r"Timed\.step: missing .*'metric'.*engine\.step\(lr_kwargs="):
            both.engine.step()
        assert (both.engine.global_steps, both.engine.micro_steps) == (0, 0)
        both.engine.step(lr_kwargs={"epoch": 2, "metric": 0.5})
        assert (both.engine.global_steps, schedule.epoch) == (1, 2)


def test_a_step_without_a_backward_is_refused(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 2}) as both:
        for step in range(2):
            with pytest.raises(StepError, match="no backward") as caught:
                both.engine.step()
            assert "engine.backward(loss)" in str(caught.value)
            both.engine_step(step)
        both.require_equal()
        both.engine.backward(loss_of(both.engine(**both.batch(2))))
        both.engine.reset()
        with pytest.raises(StepError, match="no backward"):
            both.engine.step()


_CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.json"))


def _with_directory(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {
            key: directory if key == "nvme_path" else _with_directory(inner, directory) for key, inner in value.items()
        }
    return value


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_config_trains_to_the_bits_of_plain_torch(path: Path, tmp_path: Path) -> None:
    config = _with_directory(json.loads(path.read_text()), str(tmp_path))
    engine, optimizer, _, _ = infinity.initialize(model=PLAIN.make("none"), config=config)
    group = optimizer.param_groups[0]
    dtype = next(engine.module.parameters()).dtype
    settings = {key: value for key, value in group.items() if key in ("lr", "betas", "eps", "weight_decay")}
    reference = PlainTorch(
        PLAIN.make("none"),
        lambda named: torch.optim.AdamW(named.values(), **settings, fused=True),
        compute_dtype=dtype,
        num_micro_batches=engine.gradient_accumulation_steps(),
        max_norm=engine.config.gradient_clipping,
    )
    expected, actual = Record(), Record()
    with engine:
        for step in range(3):
            reference.param_groups[0]["lr"] = group["lr"]
            for micro_batch in range(reference.num_micro_batches):
                batch = make_batch(step, micro_batch, dtype=dtype)
                wanted = reference.forward(batch)
                reference.backward(wanted)
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                expected.note(f"loss {step}.{micro_batch}", wanted)
                actual.note(f"loss {step}.{micro_batch}", loss)
            reference.step()
        expected.final, actual.final = reference.snapshot(), paged_snapshot(engine, optimizer)
        require_equal(expected, actual, context=path.name)
