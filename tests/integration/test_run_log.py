"""What an engine writes into the log of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, StepError
from infinity.metrics import read_run
from tests.exactness.lockstep import BF16, engine_on_nvme, everything_on_nvme

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
    with engine_on_nvme(directory, Model(), {**BF16, **(changes or {}), "infinity": own}) as engine:
        yield engine


def train(engine: Any, num_steps: int) -> list[infinity.StepReport]:
    reports = []
    for _ in range(num_steps):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(_TOKENS))
            engine.step()
        reports.append(engine.report)
    return reports


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


def test_skipped_steps_and_losses_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    changes = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    with training(tmp_path, changes) as engine:
        train(engine, 1)
        with pytest.warns(infinity.errors.NonFiniteLossWarning):
            engine.backward(engine(_TOKENS) * float("inf"))
        engine.step()
    run = read_run(tmp_path / "run")
    assert [(mark.kind, mark.step) for mark in run.marks] == [("skipped", 2), ("spike", 2)]


def test_a_second_engine_is_refused_and_leaves_the_model_alone(tmp_path: Path) -> None:
    with training(tmp_path) as engine:
        train(engine, 1)
        with pytest.raises(ConfigError, match=r"'infinity\.run_log'.*another engine"), training(tmp_path):
            pass
        train(engine, 1)
    assert len(read_run(tmp_path / "run").steps) == 2
    with training(tmp_path) as engine:  # which is the first one now
        train(engine, 1)


def test_an_engine_that_evaluates_leaves_the_log_to_the_one_that_trains(tmp_path: Path) -> None:
    """One config for both: that of a reference model is a copy of the policy's, without the optimizer."""
    config = everything_on_nvme(tmp_path, {**BF16, "infinity": {"run_log": str(tmp_path / "run")}, "optimizer": None})
    with infinity.initialize(model=Model(), config=config)[0] as reference, training(tmp_path) as engine:
        assert reference(_TOKENS).item() == engine(_TOKENS).item()
        train(engine, 2)
    assert len(read_run(tmp_path / "run").steps) == 2
    config["infinity"] |= {"durable": True}
    with pytest.raises(StepError, match=r"that is not trained .*infinity\.durable to false"):
        infinity.initialize(model=Model(), config=config)
