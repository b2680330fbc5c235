"""What somebody writes who trains a text classifier with Lightning and its DeepSpeed strategy. Leaves what happened in files.

    lightning_script.py OUT STRATEGY [--config CONFIG] [--bf16] [--clip X] [--accumulate N] [--divide N]
                        [--die-after STEPS] [--resume]

STRATEGY is "auto" for plain Lightning, "deepspeed_stage_2" and the like, or "infinity"; with a config, that is the
strategy's. Several trainings in one process are separated by the word ``then``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy, StrategyRegistry
from torch import nn

from tests.stand_in.reference import with_main_weights
from tests.stand_in.text import rows

NUM_STEPS, STEPS_PER_EPOCH, BATCH = 30, 10, 4


class OnCPU(DeepSpeedStrategy):
    """Lightning's own, without its refusal of a machine that has no GPU."""

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        if self.world_size > 1:
            self._init_deepspeed_distributed()  # as its own setup_distributed, which looks for the numbers of GPUs


class Classifier(lightning.LightningModule):
    """Of bytes: is there a "self" among them?"""

    def __init__(self, width: int = 32, *, has_main_weights: bool = False, divisor: int = 1) -> None:
        super().__init__()
        self._has_main_weights, self._divisor = has_main_weights, divisor
        self.embedding = nn.EmbeddingBag(256, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3))
        )
        self.head = nn.Linear(width, 2)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(text)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(
            self.global_step
        )  # the strategy seeds anew, plain Lightning does not; neither does on resuming

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch["text"]), batch["label"])
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss / self._divisor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self(batch["text"]), batch["label"]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        if self._has_main_weights:
            with_main_weights(self, optimizer)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Dying(Callback):
    """Kills the process after a number of steps, as a machine that goes down does."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def loader(num: int, first: int = 0) -> Any:
    """Batches of text, with labels."""
    texts = [row["input_ids"] for row in rows(num, 48, first=first)]
    items = [{"text": text, "label": int(b"self" in bytes(text.tolist()))} for text in texts]
    return torch.utils.data.DataLoader(items, batch_size=BATCH)  # type: ignore[arg-type]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("strategy")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--divide", type=int, default=1)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(words)

    lightning.seed_everything(0)
    model = Classifier(has_main_weights=args.bf16 and args.strategy == "auto", divisor=args.divide)
    strategy: Any = args.strategy
    if strategy == "infinity":
        from infinity.integrations.lightning import InfinityStrategy

        strategy = InfinityStrategy(config=args.config)
    elif strategy != "auto" and not torch.cuda.is_available():
        strategy = OnCPU(**({"config": args.config} if args.config else StrategyRegistry[strategy]["init_params"]))
    elif args.config:
        strategy = DeepSpeedStrategy(config=args.config)
    saving = ModelCheckpoint(args.out / "saved", save_last=True, every_n_train_steps=10, save_on_train_epoch_end=False)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="auto",
        precision="bf16-mixed" if args.bf16 and args.strategy.startswith("deepspeed") else None,
        devices=1,
        use_distributed_sampler=False,  # it shuffles by itself, which it does not without a strategy for several processes
        max_epochs=NUM_STEPS // STEPS_PER_EPOCH,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        callbacks=[saving, *([Dying(args.die_after)] if args.die_after else [])],
        default_root_dir=args.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=args.strategy.startswith("deepspeed"),  # which asks parameters in DeepSpeed's way
    )
    resumed = str(args.out / "saved" / "last.ckpt") if args.resume else None
    train = loader(BATCH * args.accumulate * STEPS_PER_EPOCH)
    trainer.fit(model, train, loader(2 * BATCH, first=200), ckpt_path=resumed)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    tested = trainer.validate(model, loader(2 * BATCH, first=200), verbose=False)[0]["loss"]
    torch.save(weights, args.out / "weights.pt")
    found = {"losses": model.losses, "rates": model.rates, "metrics": metrics, "tested": tested}
    (args.out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for words in " ".join(sys.argv[1:]).split(" then "):
        main(words.split())
