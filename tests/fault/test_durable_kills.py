"""Durable runs whose process is killed at any moment: each goes on to the result of one that was never killed.

The processes are forked from one that has imported everything, so that a kill costs a fraction of a second. Nothing else is
shared: the parent has no engine, no thread of ours and no open file of the run.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.lockstep import BF16
from tests.integration.test_durable_runs import Model, train, training

_STEPS = 12
_KILLS = int(os.environ.get("INFINITY_KILLS", "8"))
_MODES: dict[str, dict[str, Any]] = {
    "in backward": BF16,
    "deferred": {**BF16, "gradient_clipping": 0.1},
    "accumulated": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"keep_last": 2}},
    "vertical": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


def _run(drive: Path, changes: dict[str, Any], result: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    with training(drive, changes, Model()) as engine:
        if engine.global_steps == 0:
            torch.manual_seed(3)
        train(engine, _STEPS)
        found = hashlib.sha256()
        for _, parameter in sorted(engine.module.named_parameters()):
            found.update(parameter.float().detach().numpy().tobytes())
            if parameter.requires_grad:
                for _, value in sorted(engine.state_of(parameter).items()):
                    found.update(torch.as_tensor(value).float().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        result.write_text(f"{engine.global_steps} {engine.global_samples} {engine.get_lr()} {found.hexdigest()}")


def _forked(drive: Path, changes: dict[str, Any], result: Path, seconds: float | None) -> bool:
    """Run in a child, which is killed after so many seconds; returns whether it came to its end before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            _run(drive, changes, result)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), "the child failed by itself: see its output"
    return code == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", _MODES)
def test_kills_at_any_moment(mode: str, tmp_path: Path) -> None:
    changes = _MODES[mode]
    begin = time.monotonic()
    assert _forked(tmp_path / "whole", changes, tmp_path / "expected", None)
    whole_seconds = time.monotonic() - begin
    expected = (tmp_path / "expected").read_text()
    chance = random.Random(len(mode))
    num_kills = num_runs = 0
    while num_kills < _KILLS // len(_MODES):
        drive, result = tmp_path / f"run{num_runs}", tmp_path / f"result{num_runs}"
        num_runs += 1
        while not _forked(drive, changes, result, chance.uniform(0.1, 1) * whole_seconds):
            num_kills += 1
        assert result.read_text() == expected, f"run {num_runs}, after {num_kills} kills in all"
