"""Trainings whose process is killed at any moment of steps, saves and loads: each goes on from its newest checkpoint to the
result of one that was never killed.

``INFINITY_KILLS=1000 python -m pytest tests/fault/test_checkpoint_kills.py`` kills so often. The processes are forked from one
that has imported everything, and die at the n-th call that changes or reads files, so a kill costs a fraction of a second.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.exactness.lockstep import BF16
from tests.integration.test_durable_runs import Model, training
from tests.internals import Checkpoint, publish, scratch_file
from tests.killed import fingerprint, run_killed, ticking

_STEPS = 6
_MOST_KILLS = 4
"""Of one run."""
_KILLS = int(os.environ.get("INFINITY_KILLS", "24"))
_MODES: dict[str, dict[str, Any]] = {
    "in backward": BF16,
    "deferred": {**BF16, "gradient_clipping": 0.1},
    "fp32": {},
    "accumulated": {**BF16, "gradient_accumulation_steps": 2},
    "no exchange of names": BF16,
}
_CALLS = ("pwrite", "preadv", "pwritev", "fsync", "replace", "unlink", "rmdir", "mkdir")


def _run(top: Path, changes: dict[str, Any], tick: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    saved = top / "saved"
    changes = {**changes, "infinity": {"durable": False, "io_backend": "threads"}}
    with training(top / "drive", changes, Model()) as engine:
        torch.manual_seed(3)
        for name in _CALLS:  # what was written survives a kill without a flush
            real = getattr(os, name) if name != "fsync" else lambda descriptor: None
            mock.patch.object(os, name, ticking(real, tick)).start()
        mock.patch.object(scratch_file, "fallocate", ticking(scratch_file.fallocate, tick)).start()
        engine.load_checkpoint(saved, missing_ok=True)
        batches: Iterator[Any] = iter(())
        while engine.global_steps < _STEPS:
            batch = next(batches, None)
            if batch is None:
                batches = iter(engine.training_dataloader)
                continue
            step = engine.global_steps
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == step:
                continue
            tag = None if step % 3 else "again"  # now and then one takes the place of an older one
            engine.save_checkpoint(saved, tag=tag, blocking=step % 2 == 0, keep_last=2)
            if step == 3:
                assert engine.load_checkpoint(saved)[0] is not None
                batches = iter(())
        told = fingerprint(engine)
    (top / "result").write_text(told)


def _forked(top: Path, changes: dict[str, Any], num_ticks: int | None) -> int | None:
    return run_killed(lambda tick: _run(top, changes, tick), num_ticks)


@pytest.fixture(scope="module", autouse=True)
def _import_everything() -> None:
    """What an engine imports late takes ten times as long as a run; no thread of ours is there when children are forked."""
    importlib.import_module("torch._dynamo")

    from tests.internals import compile_kernels

    compile_kernels()


@pytest.mark.deep
@pytest.mark.timeout(600 + 10 * _KILLS)
@pytest.mark.parametrize("mode", _MODES)
def test_kills_at_any_moment(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = _MODES[mode]
    if mode == "no exchange of names":  # NFS, and others
        monkeypatch.setattr(publish, "_renameat2", None)
    (tmp_path / "whole").mkdir()
    whole = _forked(tmp_path / "whole", changes, None)
    assert whole is not None
    expected = (tmp_path / "whole" / "result").read_text()
    chance = random.Random(mode)
    num_kills = num_runs = 0
    while num_kills < _KILLS // len(_MODES):
        top = tmp_path / f"run{num_runs}"
        top.mkdir()
        num_runs += 1
        for attempt in itertools.count():
            is_last = attempt == _MOST_KILLS
            if _forked(top, changes, None if is_last else chance.randrange(1, whole)) is not None:
                break
            num_kills += 1
            latest = top / "saved" / "latest"
            if latest.exists():
                publish.remove_abandoned(top / "saved")
                assert Checkpoint.open(top / "saved").verify()
        assert (top / "result").read_text() == expected, f"run {num_runs}, after {num_kills} kills in all"
        left = [file for path in (top / "saved").iterdir() if path.name.startswith(".") for file in path.iterdir()]
        assert not left, "a killed save has left something"  # but for an empty directory, which says not whose it is
