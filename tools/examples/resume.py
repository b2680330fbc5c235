"""A run that is killed at any moment and goes on to the same bits.

    python tools/examples/resume.py

`"durable": true` commits every step to the drive. The run below is killed with -9 in the middle of a step; the same
script, started again, goes on from the last committed step. Its weights are compared with those of a run that nobody killed.
"""

import os
import shutil
import signal
from collections.abc import Callable

import torch
from torch import nn

import infinity

NUM_STEPS, KILLED_IN_STEP = 8, 5


def train(directory: str, killed_in_step: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 1))
    drive = {"device": "nvme", "nvme_path": directory}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {"host_memory_budget": "32MB", "durable": True},
    }
    data = list(torch.randn(4 * NUM_STEPS, 16, generator=torch.Generator().manual_seed(1)))
    engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=data)
    with engine:
        print(f"  begins at step {engine.global_steps}", flush=True)
        for x in loader:  # it goes on behind the samples of the last commit, too
            loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            if engine.global_steps == killed_in_step:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            print(f"  step {engine.global_steps}: loss {loss.item():.6f}", flush=True)
        torch.save(engine.module.state_dict(), f"{directory}/weights.pt")


def in_a_process_of_its_own(function: Callable[..., None], *arguments: object) -> None:
    child = os.fork()  # as good as starting the script again, and quicker
    if child == 0:
        function(*arguments)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"  killed by signal {-status}" if status < 0 else "  ended", flush=True)
    if status > 0:
        raise SystemExit(status)


if __name__ == "__main__":
    for directory in ("run-killed", "run-whole"):
        shutil.rmtree(directory, ignore_errors=True)
        os.mkdir(directory)
    print("A run that is killed:", flush=True)
    in_a_process_of_its_own(train, "run-killed", KILLED_IN_STEP)
    print("The same script again:", flush=True)
    in_a_process_of_its_own(train, "run-killed")
    print("A run that nobody kills:", flush=True)
    in_a_process_of_its_own(train, "run-whole")
    killed, whole = (torch.load(f"{directory}/weights.pt") for directory in ("run-killed", "run-whole"))
    print("weights equal:", all(torch.equal(killed[name], whole[name]) for name in whole))
