"""Durable runs on several ranks: each commits its part, and all go on from the same step."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import InfinityError, ModelError, StepError, StorageError
from swapper import RunDirectory
from tests.distributed.common import require_same, states_of, weights_of
from tests.lazy_device import LazyDevice
from tests.ranks import require_ranks, run_ranks

_WIDTH = 48
_NUM_STEPS = 5


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.dropout(x)))
        return x


def _config(directory: Path, **changes: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme},
        "infinity": {"durable": True, **changes},
    }


def _steps(engine: Any, rank: int, until: int) -> list[float]:
    losses = []
    for step in range(engine.global_steps, until):
        x, y = torch.randn(2, 4, _WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(rank: int, directory: Path, *, dies_in: int = -1) -> None:
    """Train to the end. ``dies_in``: this rank is gone just before the commit of that step is on the drive."""
    torch.manual_seed(100 + rank)
    if dies_in >= 0:
        write = RunDirectory.write

        def dying(self: RunDirectory, number: int, parts: Any) -> None:
            if json.loads(parts[1])["step"] == dies_in:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, number, parts)

        RunDirectory.write = dying  # type: ignore[method-assign]
    with infinity.initialize(model=_Model(), config=_config(directory))[0] as engine:
        found = {"began": engine.global_steps, "losses": _steps(engine, rank, _NUM_STEPS)}
        torch.save(found | {"values": weights_of(engine) | states_of(engine)}, directory / f"end{rank}")


def _run(num: int, directory: Path, dies_in: tuple[int, ...] = (-1,) * 3) -> list[str]:
    def function(rank: int) -> None:
        train(rank, directory, dies_in=dies_in[rank])

    group = directory / f"group{len(list(directory.glob('group*')))}"
    group.mkdir()
    return run_ranks(num, function, group)


@pytest.mark.deep
@pytest.mark.parametrize("num", [2, 3])
def test_killed_in_a_commit_all_go_on_from_the_same_step(num: int, tmp_path: Path) -> None:
    """Rank 1 dies before its commit, once the others have made theirs or are about to; in the very first one, twice, too."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert _run(num, whole) == [""] * num
    for dies_in in ((-1, 1, -1), (-1, 1, -1), (-1, 3, -1), (4, -1, -1)):
        errors = _run(num, killed, dies_in)
        assert any("RankError" in error for error in errors), errors
    assert _run(num, killed) == [""] * num
    for rank in range(num):
        found, expected = (torch.load(folder / f"end{rank}") for folder in (killed, whole))
        assert 2 <= found["began"] < _NUM_STEPS
        assert found["losses"] == expected["losses"][found["began"] :]
        require_same(found["values"], expected["values"])


def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    assert _run(2, tmp_path) == ["", ""]

    def refused(num: int, kind: type[InfinityError], words: str) -> bool:
        def function(rank: int) -> None:
            with pytest.raises(kind, match=words):
                infinity.initialize(model=_Model(), config=_config(tmp_path))

        group = tmp_path / f"refusing{len(list(tmp_path.glob('refusing*')))}"
        group.mkdir()
        require_ranks(num, function, group)
        return True

    runs = tmp_path / "durable"
    assert refused(3, StorageError, "no commit of rank 2, and of others that of step 5")
    assert refused(1, StorageError, "holds a durable run of several processes")
    (runs / "rank0").rename(tmp_path / "unmounted")
    assert refused(2, StorageError, "no commit of rank 0")
    shutil.rmtree(runs / "rank0")
    (tmp_path / "unmounted").rename(runs / "rank0")
    shutil.copytree(runs / "rank1", runs / "rank2", dirs_exist_ok=True)
    assert refused(3, ModelError, "is of 2 processes, not 3")


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("num", "memory"), [(2, "host"), (4, "host"), (2, "device")])
def test_all_roll_back(num: int, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps and commits its shard of the weights alone."""
    if memory == "device":
        monkeypatch.setattr(importlib.import_module("infinity.entry"), "device_for", lambda _: LazyDevice())

    def train(rank: int) -> None:
        config = _config(tmp_path, keep_last=3)
        with infinity.initialize(model=_Model(), config=config)[0] as engine:
            units = engine._parts.parameter_map.units
            kept = sum(unit.extent.num_bytes for unit in units if unit.extent is not None)
            spans = [span for unit in units for span in engine._parts.exchange.shards.weight_spans(unit)]
            assert kept == sum(stop - start for start, stop in spans) < sum(unit.num_bytes for unit in units)
            seen: list[list[Any]] = []
            for step in (0, 1, 2, 3, 2, 3):
                if len(seen) == 4:
                    engine.rollback(2)
                seen.append([*_steps(engine, rank, step + 1), engine.get_global_grad_norm()])
            assert seen[2:4] == seen[4:]

    assert run_ranks(num, train, tmp_path) == [""] * num


def _each(directory: Path, function: Callable[[Any, int], None]) -> None:
    """Start two processes, and call ``function`` with engine and rank in each."""

    def start(rank: int) -> None:
        torch.manual_seed(100 + rank)
        with infinity.initialize(model=_Model(), config=_config(directory))[0] as engine:
            function(engine, rank)

    group = directory / f"group{len(list(directory.glob('group*')))}"
    group.mkdir()
    assert run_ranks(2, start, group) == ["", ""]


def _three_steps_of_which_rank_1_lacks_the_last(directory: Path) -> None:
    """As a kill leaves them, just before it would have written the last commit and removed that of the first step."""
    commits = directory / "durable" / "rank1"

    def train(engine: Any, rank: int) -> None:
        _steps(engine, rank, 1)
        engine.save_checkpoint(directory / "saved")
        _steps(engine, rank, 2)
        engine.flush()
        if rank == 1:
            shutil.copy(commits / f"commit-{1:010}", directory / "first")
        _steps(engine, rank, 3)

    _each(directory, train)
    (directory / "first").rename(commits / f"commit-{1:010}")
    (commits / f"commit-{3:010}").unlink()


@pytest.mark.deep
def test_ranks_with_other_numbers_of_commits_begin_the_same_line_with_a_checkpoint(tmp_path: Path) -> None:
    _three_steps_of_which_rank_1_lacks_the_last(tmp_path)

    def load(engine: Any, rank: int) -> None:
        assert engine.global_steps == 2
        _steps(engine, rank, 3)
        engine.load_checkpoint(tmp_path / "saved")
        _steps(engine, rank, 3)

    def go_on(engine: Any, rank: int) -> None:
        assert engine.global_steps == 3
        _steps(engine, rank, 4)

    _each(tmp_path, load)
    _each(tmp_path, go_on)


@pytest.mark.deep
def test_a_rank_that_cannot_go_back_keeps_the_others_from_it(tmp_path: Path) -> None:
    """Rank 0 was ahead, and has no commit of the first step any more."""
    _three_steps_of_which_rank_1_lacks_the_last(tmp_path)

    def go_back(engine: Any, rank: int) -> None:
        assert engine.global_steps == 2
        with pytest.raises(StepError, match=r"engine\.rollback\(1\)"):
            engine.rollback(1)
        _steps(engine, rank, 3)
        engine.rollback(1)
        assert engine.global_steps == 2
        _steps(engine, rank, 3)

    def go_on(engine: Any, rank: int) -> None:
        assert engine.global_steps == 3
        _steps(engine, rank, 4)

    _each(tmp_path, go_back)
    _each(tmp_path, go_on)
