"""Many micro-batches in a step: each weight is read twice a step, however many there are.

    python tools/examples/micro_batches.py

`engine.train_batch` takes all micro-batches through a block before it goes on to the next one (the vertical schedule).
In the ordinary order every micro-batch reads every block again. Both are run here, and their bytes compared.
"""

import torch
from torch import nn

import infinity

NUM_MICRO_BATCHES, NUM_STEPS = 8, 4
DRIVE = {"device": "nvme", "nvme_path": "."}  # any directory; what is written there has no name and vanishes at the end


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(320, 640), nn.ReLU(), nn.Linear(640, 320)) for _ in range(6)]
    return nn.Sequential(nn.Linear(16, 320), *blocks, nn.Linear(320, 1))


class WithLoss(nn.Module):
    """`train_batch` calls the model with each micro-batch and takes what comes back as its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x.to(torch.bfloat16)).float(), y)


def train(schedule: str) -> tuple[list[float], infinity.StepReport]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
        # Without keep_in_memory, a model this small would stay in memory, and nothing would be read.
        "infinity": {"host_memory_budget": "8MB", "schedule": schedule, "keep_in_memory": False},
    }
    x = torch.randn(NUM_STEPS * NUM_MICRO_BATCHES * 4, 16, generator=torch.Generator().manual_seed(1))
    data = [(row, row.sum(0, keepdim=True)) for row in x]
    engine, *_ = infinity.initialize(model=WithLoss(), config=config, training_data=data)
    with engine:
        losses = [float(engine.train_batch()) for _ in range(NUM_STEPS)]
        return losses, engine.report


if __name__ == "__main__":
    found = {schedule: train(schedule) for schedule in ("ordinary", "vertical")}
    for schedule, (losses, report) in found.items():
        print(
            f"{schedule:9}: read {report.read_bytes / 1e6:5.1f} MB, wrote {report.write_bytes / 1e6:4.1f} MB in the last step"
        )
        print(f"           losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    less = found["ordinary"][1].read_bytes / found["vertical"][1].read_bytes
    print(f"The vertical schedule read {less:.1f} times less.")
