"""The demo's own decisions: its config, its learning rates, its warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train import warm_up

_ROOT = Path(__file__).resolve().parents[3]


def test_the_rate_rises_first() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warm_up(optimizer, 20)
    for rate in (0.5, 1.0, 1.0):
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        schedule.step()


@pytest.mark.deep
@pytest.mark.parametrize(("wanted", "spins"), [(None, False), ("active", True)])
def test_threads_sleep_while_they_wait(wanted: str | None, spins: bool, tmp_path: Path) -> None:
    """On a busy machine, those that spin make a step ten times as long. A user's own setting stays."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": wanted} if wanted else {})
    (tmp_path / "short").write_text("too short to train on")
    command = [sys.executable, str(_ROOT / "tools" / "train.py"), "--model", "tiny", "--text", "short"]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path).stderr
    assert "Lower --seq-len" in told
    assert "GOMP_SPINCOUNT" in told and ("GOMP_SPINCOUNT = '0'" not in told) == spins
