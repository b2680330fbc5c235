"""``infinity.activations``: the bits of plain torch, in less memory or within the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import BudgetTooSmallError, ConfigError
from tests.budgeted_training import LONG_BUDGETS
from tests.exactness import families
from tests.exactness.lockstep import engine_on_nvme
from tests.internals import Cgroup

_LENGTH = 512
"""Of sequences: what a layer of these small models saves is large enough to leave memory."""


def _llama() -> Any:
    torch.manual_seed(5)
    model: Any = families.llama()
    model.config.use_cache = False
    return model


def _batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, families.VOCABULARY, (2, _LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _train(engine: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(3):
        loss = engine(**_batch(number)).loss
        with torch.no_grad():
            engine(**_batch(number))  # evaluation in between
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def _run(directory: Path, own: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    with engine_on_nvme(directory, _llama(), {"infinity": own}) as engine:
        losses = _train(engine)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return losses, weights, engine.report


@pytest.fixture(scope="module", params=[False, True], ids=["saving", "checkpointing"])
def in_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whether blocks are recomputed, and what comes out where activations stay in memory."""
    return request.param, _run(tmp_path_factory.mktemp("memory"), {"activation_checkpointing": request.param})


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("activations", "budget"), [("nvme", "1MiB"), ("nvme", "64MiB"), ("cpu", "256MiB")])
def test_losses_and_weights_are_the_same(activations: str, budget: str, in_memory: Any, tmp_path: Path) -> None:
    checkpointing, (expected, weights, before) = in_memory
    own = {"activation_checkpointing": checkpointing, "activations": activations, "host_memory_budget": budget}
    losses, others, report = _run(tmp_path, own)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=True))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert budget != "1MiB" or report.write_bytes > before.write_bytes


@pytest.mark.deep
def test_more_than_the_budget_has_for_it_is_an_error_that_says_how_much(tmp_path: Path) -> None:
    own: dict[str, Any] = {"activations": "cpu", "host_memory_budget": "1MiB"}
    with engine_on_nvme(tmp_path, _llama(), {"infinity": own}) as engine:
        assert "more is an error" in str(engine.plan)
        with torch.no_grad():
            engine(**_batch(0))  # keeps nothing
        for _ in range(2):
            with pytest.raises(BudgetTooSmallError, match=r'activations is "cpu".*"nvme".*activation_checkpointing'):
                engine(**_batch(0))
            engine.reset()
        assert _left(engine) == 0
    own["activation_checkpointing"] = True
    own["host_memory_budget"] = "3MiB"
    with engine_on_nvme(tmp_path, _llama(), {"infinity": own}) as engine:
        _train(engine)


def _left(engine: Any) -> int:
    gc.collect()
    saved = engine._coordinator._activations
    saved._sweep()
    return len(saved._all)


def test_without_drives_it_is_refused_by_name(tmp_path: Path) -> None:
    changes = {"zero_optimization": None, "infinity": {"activations": "nvme"}}
    with pytest.raises(ConfigError, match=r"infinity\.activations"):
        engine_on_nvme(tmp_path, nn.Linear(4, 4), changes)


@pytest.mark.deep
def test_vertical_steps_keep_what_they_keep_anyway(tmp_path: Path) -> None:
    found = []
    for activations in ("memory", "cpu", "nvme"):
        own = {"activations": activations, "schedule": "vertical"}
        with engine_on_nvme(tmp_path, _llama(), {"gradient_accumulation_steps": 2, "infinity": own}) as engine:
            data = iter([_batch(number) for number in range(4)])
            losses = [engine.train_batch(data) for _ in range(2)]
            assert engine.report.schedule == "vertical"
            found.append(losses)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.root
@pytest.mark.deep
def test_long_sequences_take_less_memory(
    nvme_dir: Path, memory_cgroup: Cgroup, run_in_little_memory: Callable[..., list[dict[str, Any]]]
) -> None:
    if memory_cgroup.memory is None or not memory_cgroup.memory.reset_peak():
        pytest.skip("the peak of a control group (version 2) cannot be reset before Linux 6.12")
    peaks = {}
    for activations in ("memory", "cpu", "nvme"):
        [peaks[activations]] = run_in_little_memory(
            "budgeted_training", "train_on_long_sequences", str(nvme_dir), activations
        )
    assert peaks["memory"]["loss"] == peaks["nvme"]["loss"] == peaks["cpu"]["loss"]
    assert peaks["memory"]["activation_bytes"] < peaks["cpu"]["peak_bytes"] < LONG_BUDGETS["cpu"]
    saved = peaks["memory"]["peak_bytes"] - peaks["nvme"]["peak_bytes"]
    assert saved > 0.6 * peaks["memory"]["activation_bytes"], peaks
