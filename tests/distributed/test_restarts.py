"""torchrun ends all ranks when one fails, each names the first cause, and what it starts anew goes on from the checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process

from tests.ranks import require_ranks

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 500
_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import infinity
from infinity.deepspeed import comm

out, dies_with = Path(sys.argv[1]), sys.argv[2]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
torch.manual_seed(int(os.environ.get("RANK", 0)))
data = [(torch.full((8,), i / 8.0), torch.zeros(1)) for i in range(24)]
config = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 0},
    "infinity": {"progress_bars": False},
}
engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=data)
engine.load_checkpoint(out / "saved", missing_ok=True)
for x, y in loader:
    rank, steps = comm.get_rank(), engine.global_steps
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    if rank == 1 and steps == 2 and attempt == 0:
        if dies_with == "error":
            raise OSError(5, "Input/output error", "/mnt/drive")
    if dies_with == "error" and rank == 1 and steps == 4 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
    engine.save_checkpoint(out / "saved", keep_last=1)
torch.save([comm.get_world_size(), attempt, engine.module.state_dict()], out / f"end {comm.get_rank()}")
"""


def _start(directory: Path, dies_with: str, *options: str) -> subprocess.Popen[str]:
    script = directory / "train.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(directory), dies_with]
    environment = {"PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(directory)  # torchrun leaves its logs there
    return subprocess.Popen(
        command, env=os.environ | environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )


def _ended(running: subprocess.Popen[str]) -> str:
    """What it said, when it has ended; and nothing is left of what it started."""
    try:
        return running.communicate(timeout=_LIMIT_SECONDS)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rendezvous", ["static", "standalone"])
def test_errors_and_kills_end_all_ranks_and_the_next_start_goes_on(
    rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start ends by an error of rank 1, the second by kill -9; the third comes to the end, with the same bits."""
    where = "--standalone" if rendezvous == "standalone" else f"--master-port={_free_port()}"
    said = _ended(_start(tmp_path, "error", "--nproc-per-node=2", "--max-restarts=2", where))
    assert (tmp_path / "end 1").exists(), said
    of_rank_0 = [line for line in said.splitlines() if "ended by its launcher" in line or "RankError: rank 0" in line]
    assert any(
        "rank 1 failed with OSError: [Errno 5] Input/output error: '/mnt/drive'" in line for line in of_rank_0
    ), said
    assert any(re.search(r"the process of rank 1 \(\d+\) has ended", line) for line in of_rank_0), said

    whole = tmp_path / "uninterrupted"
    whole.mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py", str(whole), "nothing"])
    require_ranks(2, lambda rank: exec(_SCRIPT, {"__name__": "__main__"}), whole)
    for rank in range(2):
        num, attempt, weights = torch.load(tmp_path / f"end {rank}")
        assert (num, attempt) == (2, 2)
        for name, value in torch.load(whole / f"end {rank}")[2].items():
            assert torch.equal(weights[name], value), name
