"""Lightning's DeepSpeedStrategy with two devices, the bits of its DDP. Under torchrun, as DeepSpeed, with a directory."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch

from tests.stand_in.lightning_script import Classifier, OnCPU, loader


def fit(directory: Path, strategy: Any, epochs: int, resumes: Path | None = None) -> Any:
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        gradient_clip_val=0.1,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, loader(32), ckpt_path=resumes)
    return model, trainer


def main(directory: Path) -> None:
    expected, _ = fit(directory, "ddp", 2)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    losses = []
    for epochs, resumes in ((1, None), (2, directory / "saved")):
        model, trainer = fit(directory, OnCPU(config=dict(config)), epochs, resumes)
        trainer.save_checkpoint(directory / "saved", weights_only=False)
        trainer.strategy.deepspeed_engine.close()
        losses += model.losses
    assert losses == expected.losses, (losses, expected.losses)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())


def tutorial(directory: Path) -> None:
    """The config of Lightning's own guide to 1-bit Adam, as it stands there: all steps are its warm-up."""
    config = {
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 3e-5, "betas": [0.998, 0.999], "eps": 1e-5, "weight_decay": 1e-9, "cuda_aware": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 100},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_bucket_size": 2e8,
            "reduce_bucket_size": 2e8,
        },
    }
    model, trainer = fit(directory, OnCPU(config=config), 1)
    engine = trainer.strategy.deepspeed_engine
    assert engine.global_steps == len(model.losses) == 4
    engine.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
    tutorial(Path(sys.argv[1]))
