"""Two processes train one model, each on its own half of the data; main weights and states are divided between them.

    python tools/examples/two_processes.py
    torchrun --nproc-per-node 2 tools/examples/two_processes.py

Both lines do the same: without torchrun, the script starts it. Between hosts: `infinity launch --hostfile FILE SCRIPT`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process; torchrun warns without it
import torch
from torch import nn
from torch.distributed.run import main as torchrun

import infinity

NUM_STEPS = 4
DRIVE = {"device": "nvme", "nvme_path": "."}  # where each process has a drive of its own, name that one
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_param": DRIVE, "offload_optimizer": DRIVE},
    "infinity": {"host_memory_budget": "16MB", "keep_in_memory": False},  # of each process
}


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), *(nn.Linear(128, 128) for _ in range(6)), nn.Linear(128, 1))
    x = torch.randn(2 * 4 * NUM_STEPS, 16)
    # initialize joins the process group that torchrun has described, and the loader draws this rank's samples.
    engine, _, loader, _ = infinity.initialize(model=model, config=CONFIG, training_data=list(x))
    with engine:
        for batch in loader:
            loss = nn.functional.mse_loss(engine(batch), batch.sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()  # averages gradients, updates this rank's half, and gathers the new weights
        report, rank = engine.report, engine.global_rank
        print(
            f"rank {rank} of {engine.world_size}: loss {loss.item():.4f}, wrote {report.write_bytes / 1e6:.2f} MB",
            flush=True,
        )
        weights = torch.cat([value.flatten() for value in engine.module.state_dict().values()])
    halves = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(halves, weights)
    if rank == 0:
        print("weights equal on both:", torch.equal(*halves), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
