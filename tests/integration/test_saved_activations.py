"""``infinity.activations: "nvme"``: the bits of plain torch, in less memory."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from bench.cgroup import Cgroup
from infinity.errors import ConfigValueError
from tests.exactness import families
from tests.exactness.lockstep import everything_on_nvme

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
    engine, *_ = infinity.initialize(model=_llama(), config=everything_on_nvme(directory, {"infinity": own}))
    with engine:
        losses = _train(engine)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return losses, weights, engine.report


@pytest.mark.parametrize("budget", ["1MiB", "64MiB"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_weights_are_the_same(budget: str, checkpointing: bool, tmp_path: Path) -> None:
    expected, weights, before = _run(tmp_path, {"activation_checkpointing": checkpointing})
    own = {"activation_checkpointing": checkpointing, "activations": "nvme", "host_memory_budget": budget}
    losses, others, report = _run(tmp_path, own)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=True))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    if budget == "1MiB":
        assert report.write_bytes > before.write_bytes


def test_without_drives_it_is_refused_by_name(tmp_path: Path) -> None:
    changes = {"zero_optimization": None, "infinity": {"activations": "nvme"}}
    with pytest.raises(ConfigValueError, match=r"infinity\.activations"):
        infinity.initialize(model=nn.Linear(4, 4), config=everything_on_nvme(tmp_path, changes))


def test_the_plan_says_what_is_reserved(tmp_path: Path) -> None:
    changes = {"infinity": {"activations": "nvme"}}
    with infinity.initialize(model=_llama(), config=everything_on_nvme(tmp_path, changes))[0] as engine:
        assert engine.plan.placement.activation_bytes > 0
        assert "activations" in str(engine.plan)


def test_vertical_steps_keep_what_they_keep_anyway(tmp_path: Path) -> None:
    found = []
    for activations in ("memory", "nvme"):
        own = {"activations": activations, "schedule": "vertical"}
        config = everything_on_nvme(tmp_path, {"gradient_accumulation_steps": 2, "infinity": own})
        with infinity.initialize(model=_llama(), config=config)[0] as engine:
            data = iter([_batch(number) for number in range(4)])
            losses = [engine.train_batch(data) for _ in range(2)]
            assert engine.report.schedule == "vertical"
            found.append(losses)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_loss_that_is_never_differentiated_gives_its_space_back(tmp_path: Path) -> None:
    changes = {"infinity": {"activations": "nvme", "host_memory_budget": "1MiB"}}
    with infinity.initialize(model=_llama(), config=everything_on_nvme(tmp_path, changes))[0] as engine:
        for number in range(4):
            loss = engine(**_batch(number)).loss
            del loss
        gc.collect()
        engine.backward(engine(**_batch(9)).loss)
        engine.step()


@pytest.mark.root
@pytest.mark.slow
def test_long_sequences_take_less_memory(
    nvme_dir: Path, memory_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    group = str(memory_cgroup.task_files[0].parent)
    peaks = {}
    for activations in ("memory", "nvme"):
        code = (
            "from tests.budgeted_training import train_on_long_sequences\n"
            f"train_on_long_sequences({group!r}, {str(nvme_dir)!r}, {activations!r})\n"
        )
        ended = run_in_cgroup(memory_cgroup, code)
        assert ended.returncode == 0, ended.stderr
        peaks[activations] = json.loads(ended.stdout)
    assert peaks["memory"]["loss"] == peaks["nvme"]["loss"]
    saved = peaks["memory"]["peak_bytes"] - peaks["nvme"]["peak_bytes"]
    assert saved > 0.6 * peaks["memory"]["activation_bytes"], peaks
