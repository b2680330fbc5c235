"""Your own module, trained from a drive, and compared bit by bit with plain PyTorch.

    python tools/examples/own_module.py

The same model, seed and batches are trained twice: in memory, and by an engine that pages most of weights and states.
"""

import torch
from torch import nn

import infinity

NUM_STEPS = 5
DRIVE = {"device": "nvme", "nvme_path": "."}  # any directory; what is written there has no name and vanishes at the end
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,  # left out, it is 1.0, as in DeepSpeed
    "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
    "infinity": {"host_memory_budget": "6MB"},  # this model has 8 MB of weights and states
}


class Block(nn.Module):
    """Any module will do: the engine needs no base class, no wrapper and no change of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 160), *(Block(160) for _ in range(6)), nn.Linear(160, 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def train_in_memory() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_from_drive() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = infinity.initialize(model=model, optimizer=optimizer, config=CONFIG)
    with engine:
        print(engine.plan, end="\n\n")
        losses = []
        for step in range(NUM_STEPS):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report = engine.report
        print(f"The last step read {report.read_bytes / 1e6:.1f} MB and wrote {report.write_bytes / 1e6:.1f} MB.")
        return losses, engine.module.state_dict()


if __name__ == "__main__":
    (losses, weights), (expected_losses, expected) = train_from_drive(), train_in_memory()
    print("losses:", ", ".join(f"{loss:.4f}" for loss in losses))
    print("losses equal:", losses == expected_losses)
    print("weights equal:", all(torch.equal(weights[name], expected[name]) for name in expected))
