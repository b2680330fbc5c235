"""What an engine writes into the log of its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, StepError
from infinity.metrics import RunLog, read_run
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.ranks import run_ranks

_TOKENS = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    """Predicts what it gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


@contextmanager
def training(directory: Path, changes: dict[str, Any] | None = None) -> Iterator[Any]:
    own = {"run_log": str(directory / "run"), **(changes or {}).get("infinity", {})}
    config = everything_on_nvme(directory, {**BF16, **(changes or {}), "infinity": own})
    engine, *_ = infinity.initialize(model=Model(), config=config)
    with engine:
        yield engine


def train(engine: Any, num_steps: int) -> list[infinity.StepReport]:
    reports = []
    for _ in range(num_steps):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(_TOKENS))
            engine.step()
        reports.append(engine.report)
    return reports


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("calls", ["engine", "model"])
def test_samples_are_those_of_the_data(calls: str, tmp_path: Path) -> None:
    with training(tmp_path, {"train_micro_batch_size_per_gpu": 4}) as engine:
        tokens = torch.zeros(7, 6, dtype=torch.int64)
        engine.backward((engine if calls == "engine" else engine.module)(tokens))
        engine.step()
        expected = (
            7 if calls == "engine" else 4
        )  # of a call that the engine does not see, only the config's number is known
        assert engine.report.num_samples == expected and read_run(tmp_path / "run").steps == [engine.report]


def test_the_log_holds_what_the_engine_says(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    with training(tmp_path, {"scheduler": scheduler, "gradient_accumulation_steps": 2}) as engine:
        reports = train(engine, 4)
        engine.note("now with another rate")
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.5
        reports += train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
    run = read_run(tmp_path / "run")
    assert run.steps == reports and run.has_ended
    assert [(mark.kind, mark.step) for mark in run.marks] == [("note", 4), ("lr", 5), ("save", 5)]
    assert run.start["config"]["scheduler"] == scheduler and run.start["machine"]["torch"] == torch.__version__
    first, last = run.steps[0], run.steps[-1]
    assert (first.num_samples, first.num_tokens) == (2 * len(_TOKENS), 2 * _TOKENS.numel()), "both as they were seen"
    assert last.lr == (0.5,) and 0 < run.steps[-2].lr[0] < 0.01
    assert first.host_peak_bytes >= first.host_bytes > 1 << 20
    assert all(0 < step.buffers_peak_bytes <= engine.plan.host_budget_bytes for step in run.steps)
    phases = last.forward_seconds + last.backward_seconds + last.update_seconds
    assert last.compute_busy_seconds == pytest.approx(phases) and min(last.forward_seconds, last.backward_seconds) > 0


@pytest.mark.deep
def test_losses_are_the_same_with_and_without_a_log(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        logged = [report.loss for report in train(engine, 4)]
    with training(tmp_path, {"infinity": {"run_log": None}}) as engine:
        engine.note("which goes to Python's logging")
        assert [report.loss for report in train(engine, 4)] == logged


def test_a_vertical_step_counts_each_batch_once(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}
    with training(tmp_path, changes) as engine:
        for _ in range(3):
            engine.train_batch(iter([(_TOKENS,)] * 3))
    assert [step.num_tokens for step in read_run(tmp_path / "run").steps] == [36, 36, 36]


def test_a_plain_loop_has_no_losses(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        for _ in range(2):
            engine.module(_TOKENS).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    assert [(step.step, step.loss) for step in read_run(tmp_path / "run").steps] == [(1, None), (2, None)]


@pytest.mark.deep
def test_a_durable_run_that_is_rolled_back_and_started_again(tmp_path: Path) -> None:
    changes = {"infinity": {"durable": True, "keep_last": 3}}
    with training(tmp_path, changes) as engine:
        train(engine, 4)
        engine.rollback(2)
        train(engine, 1)
    with training(tmp_path, changes) as engine:
        train(engine, 1)
    run = read_run(tmp_path / "run")
    assert [step.step for step in run.steps] == [1, 2, 3, 4] and run.num_starts == 2
    words = [(mark.kind, mark.step, mark.text) for mark in run.marks]
    assert words == [("rollback", 4, "went back to step 2"), ("restart", 3, "started again from step 3")]


def test_a_checkpoint_takes_the_run_to_its_step(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, 2)
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, 1)
    run = read_run(tmp_path / "run")
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert [(mark.kind, mark.step) for mark in run.marks] == [("save", 2), ("load", 4)]


@pytest.mark.deep
@pytest.mark.parametrize("only_weights", [False, True])
def test_a_run_that_is_resumed_from_a_checkpoint_shows_all_of_its_steps(only_weights: bool, tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        first = train(engine, 3)
        engine.save_checkpoint(tmp_path / "saved")
        lost = train(engine, 2)
    with training(tmp_path) as engine:
        assert read_run(tmp_path / "run").steps == first + lost
        engine.load_checkpoint(tmp_path / "saved", load_module_only=only_weights)
        again = train(engine, 1)
    assert read_run(tmp_path / "run").steps == ([] if only_weights else first) + again


def test_a_run_that_begins_anew_in_the_same_log_replaces_the_one_before(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        train(engine, 3)
    with training(tmp_path) as engine:
        again = train(engine, 2)
    assert read_run(tmp_path / "run").steps == again


def test_skipped_steps_and_losses_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    changes = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    with training(tmp_path, changes) as engine:
        train(engine, 1)
        with pytest.warns(infinity.errors.NonFiniteLossWarning):
            engine.backward(engine(_TOKENS) * float("inf"))
        engine.step()
    run = read_run(tmp_path / "run")
    assert [(mark.kind, mark.step) for mark in run.marks] == [("skipped", 2), ("spike", 2)]


def test_an_engine_that_cannot_be_made_leaves_no_log(tmp_path: Path) -> None:
    with (
        pytest.raises(infinity.errors.BudgetTooSmallError),
        training(tmp_path, {"infinity": {"host_memory_budget": "64KiB"}}),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_second_engine_is_refused_and_leaves_the_model_alone(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        train(engine, 1)
        with (
            pytest.raises(ConfigError, match=r"'infinity\.run_log'.*another engine"),
            training(tmp_path),
        ):
            pass
        train(engine, 1)
    assert len(read_run(tmp_path / "run").steps) == 2
    with training(tmp_path) as engine:  # which is the first one now
        train(engine, 1)


def test_an_engine_that_evaluates_leaves_the_log_to_the_one_that_trains(tmp_path: Path) -> None:
    """One config for both: that of a reference model is a copy of the policy's, without the optimizer."""
    config = everything_on_nvme(tmp_path, {**BF16, "infinity": {"run_log": str(tmp_path / "run")}, "optimizer": None})
    reference, *_ = infinity.initialize(model=Model(), config=config)
    with reference, training(tmp_path) as engine:
        assert reference(_TOKENS).item() == engine(_TOKENS).item()
        train(engine, 2)
    assert len(read_run(tmp_path / "run").steps) == 2
    config["infinity"] |= {"durable": True}
    with pytest.raises(StepError, match=r"that is not trained .*infinity\.durable to false"):
        infinity.initialize(model=Model(), config=config)


@pytest.mark.deep
def test_the_first_rank_writes(tmp_path: Path) -> None:
    def rank(index: int) -> None:
        with training(tmp_path) as engine:
            train(engine, 2)

    assert run_ranks(2, rank, tmp_path) == ["", ""]
    run = read_run(tmp_path / "run")
    assert [step.num_tokens for step in run.steps] == [24, 24], "of both ranks"
    assert run.num_starts == 1 and run.start["machine"]["num_processes"] == 2


@pytest.mark.deep
def test_a_line_costs_little_beside_a_step(tmp_path: Path) -> None:
    """Both are measured in one run: the processor time of the smallest step there is, and that of its lines."""
    with training(tmp_path) as engine:
        train(engine, 3)
        began = time.process_time()
        (report, *_) = train(engine, 10)
        step_seconds = (time.process_time() - began) / 10
    log = RunLog(tmp_path / "other")
    began = time.process_time()
    for _ in range(200):
        log.note_step(report, [0.1])
    line_seconds = (time.process_time() - began) / 200
    log.release()
    assert line_seconds < 0.1 * step_seconds, (line_seconds, step_seconds)
