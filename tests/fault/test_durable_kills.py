"""Durable runs whose process is killed at any moment: each goes on to the result of one that was never killed.

The processes are forked from one that has imported everything, so that a kill costs a fraction of a second. Nothing else is
shared: the parent has no engine, no thread of ours and no open file of the run. A child is killed by itself, when it has done
a given number of things (a write, a flush, a rename, a module's forward): that is as random, and does not depend on load.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.exactness.lockstep import BF16
from tests.integration.test_durable_runs import Model, train, training
from tests.killed import fingerprint, run_killed, ticking

_STEPS = 8
MOST_KILLS = 4
"""Of one run."""
_KILLS = int(os.environ.get("INFINITY_KILLS", "24"))
MODES: dict[str, dict[str, Any]] = {
    "in backward": BF16,
    "deferred": {**BF16, "gradient_clipping": 0.1},
    "accumulated": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"keep_last": 2}},
    "vertical": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


def _run(drive: Path, changes: dict[str, Any], result: Path, tick: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    patches = []
    for name in ("pwritev", "fdatasync", "fsync", "replace", "unlink"):
        is_flush = "sync" in name  # what was written survives a kill without
        real = (lambda fd: None) if is_flush else getattr(os, name)
        patches.append(mock.patch.object(os, name, ticking(real, tick)))
        patches[-1].start()
    nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: tick())
    with training(drive, _with_threads(changes), Model()) as engine:
        if engine.global_steps == 0:
            torch.manual_seed(3)
        train(engine, _STEPS)
        told = fingerprint(engine)
    result.write_text(told)


def _with_threads(changes: dict[str, Any]) -> dict[str, Any]:
    return {**changes, "infinity": {**changes.get("infinity", {}), "io_backend": "threads"}}


def forked(drive: Path, changes: dict[str, Any], result: Path, num_ticks: int | None) -> int | None:
    return run_killed(lambda tick: _run(drive, changes, result, tick), num_ticks)


@pytest.mark.deep
@pytest.mark.timeout(600 + 10 * _KILLS)
@pytest.mark.parametrize("mode", MODES)
def test_kills_at_any_moment(mode: str, tmp_path: Path) -> None:
    changes = MODES[mode]
    num_ticks = forked(tmp_path / "whole", changes, tmp_path / "expected", None)
    assert num_ticks is not None
    expected = (tmp_path / "expected").read_text()
    chance = random.Random(f"{mode} {os.environ.get('INFINITY_SEED', 0)}")
    for first in range(0, _KILLS // len(MODES), MOST_KILLS):
        drive, result = tmp_path / f"run{first}", tmp_path / f"result{first}"
        for _ in range(min(MOST_KILLS, _KILLS // len(MODES) - first)):
            forked(drive, changes, result, chance.randint(1, num_ticks * 2 // 3))
        assert forked(drive, changes, result, None) is not None
        assert result.read_text() == expected, f"the run that begins with kill {first}"
