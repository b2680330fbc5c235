"""Two processes share each layer's tensors by torch's parallelize_module, and each one pages its part of them.

    python tools/examples/tensor_parallel.py
    torchrun --nproc-per-node 2 tools/examples/tensor_parallel.py

Both lines do the same: without torchrun, the script starts it. For data parallelism beside it, make a mesh of all processes
with the dimensions ("dp", "tp"), give mesh["tp"] to parallelize_module and mesh_param=mesh to infinity.initialize.
"""

import copy
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process; torchrun warns without it
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity

NUM_STEPS = 4
DRIVE = {"device": "nvme", "nvme_path": "."}
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
}


def train() -> None:
    infinity.init_distributed()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # The DTensors say over which processes they are divided.
    engine = infinity.initialize(model=model, config=CONFIG)[0]
    with engine:
        for _ in range(NUM_STEPS):
            x = torch.randn(8, 16)  # the same on both: they compute one model together
            loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()
            expected = nn.functional.mse_loss(plain(x), x.sum(1, keepdim=True))
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = engine.module.state_dict()["0.weight"].shape[0]
        print(f"rank {engine.global_rank} has {rows} of 128 rows, loss {loss.item():.4f}", flush=True)
        if engine.global_rank == 0:
            print("losses equal to one process's, but for the last bits:", torch.allclose(loss, expected), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
