"""A text classifier with Lightning on the engine: which module of the standard library does a line come from?

    python tools/examples/lightning_classifier.py

The data are the library's own sources, so nothing is downloaded. One import and one argument make it page its states.
"""

import logging
import warnings
from pathlib import Path

import lightning
import torch
from torch import nn

from infinity.integrations.lightning import InfinityStrategy

NAMES = ("argparse", "ast", "logging/__init__", "turtle")  # the labels
LENGTH, BATCH = 64, 32
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "."},  # any directory
        "offload_optimizer": {"device": "nvme", "nvme_path": "."},
    },
    "infinity": {"host_memory_budget": "8MB"},
}


class Classifier(lightning.LightningModule):
    """Counts of pairs of bytes, embedded, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(1 << 12, 48)
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, len(NAMES)))

    def forward(self, lines: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding((lines[:, :-1] * 131 + lines[:, 1:]) % (1 << 12)))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        lines, labels = batch
        return nn.functional.cross_entropy(self(lines), labels)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        lines, labels = batch
        self.log("accuracy", (self(lines).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-2)


def lines_and_labels() -> torch.utils.data.TensorDataset:
    rows, labels = [], []
    for label, name in enumerate(NAMES):
        text = (Path(logging.__file__).parents[1] / f"{name}.py").read_bytes()
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 20][:500]
        rows += [list(line[:LENGTH].ljust(LENGTH)) for line in lines]
        labels += [label] * len(lines)
    return torch.utils.data.TensorDataset(torch.tensor(rows), torch.tensor(labels))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*num_workers.*")
    lightning.seed_everything(0)
    train, validation = torch.utils.data.random_split(lines_and_labels(), [0.8, 0.2])
    trainer = lightning.Trainer(
        strategy=InfinityStrategy(config=CONFIG),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = [torch.utils.data.DataLoader(part, BATCH, shuffle=part is train) for part in (train, validation)]
    trainer.fit(Classifier(), *loaders)
    print(f"accuracy: {float(trainer.callback_metrics['accuracy']):.2f} (guessing: {1 / len(NAMES):.2f})")
