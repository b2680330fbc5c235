"""Two processes have a half of the layers each (torch.distributed.pipelining), and each one pages its half.

    python tools/examples/pipeline_stages.py
    torchrun --nproc-per-node 2 tools/examples/pipeline_stages.py

Both lines do the same: without torchrun, the script starts it. With more processes, make the mesh's second dimension longer:
those with the same stage divide its states, and each has its own data.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process; torchrun warns without it
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.run import main as torchrun

import infinity

NUM_STEPS, NUM_MICRO_BATCHES = 8, 4
DRIVE = {"device": "nvme", "nvme_path": "."}
CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
    "gradient_clipping": 1.0,  # by the norm of both halves
}


def train() -> None:
    infinity.init_distributed()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    own = nn.Sequential(*layers[2 * stage : 2 * stage + 2])
    engine = infinity.initialize(model=own, config=CONFIG, mesh_param=mesh)[0]
    half = PipelineStage(engine.module, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(half, NUM_MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    means = []
    with engine:
        x = torch.randn(16, 16)
        for _ in range(NUM_STEPS):
            losses: list[torch.Tensor] = []
            with engine.no_sync():  # the schedule runs the backward of each micro-batch
                if stage == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=x.sin(), losses=losses)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            means += [torch.stack(losses).mean().item()] if losses else []
    if stage == 1:
        print(f"loss {means[0]:.4f}, then {means[-1]:.4f}. It fell: {means[-1] < means[0]}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
