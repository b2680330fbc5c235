"""Ray Train starts two workers; one is killed in the middle, and both go on from the last checkpoint.

pip install 'ray[train]'
python tools/examples/ray_train.py
"""

import os
import signal
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from safetensors.torch import load_file
from torch import nn

import infinity

NUM_STEPS = 6


def config(directory: Path, num_micro_batches: int) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": str(directory / "drive")}  # name a local drive of each machine
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": num_micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {"progress_bars": False},
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))


def backward(engine: infinity.Engine, step: int, rank: int) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
    engine.backward(nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True)))
    engine.step()


def train(directory: Path) -> None:
    # Ray has made the process group, which initialize joins.
    engine, *_ = infinity.initialize(model=model(), config=config(directory, 1))
    engine.load_checkpoint(directory / "checkpoints", missing_ok=True)  # the first time there is none
    for step in range(engine.global_steps, NUM_STEPS):
        backward(engine, step, engine.global_rank)
        engine.save_checkpoint(directory / "checkpoints", keep_last=2)
        if step == 3 and engine.global_rank == 1 and not (directory / "killed").exists():
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    engine.save_16bit_model(directory / "trained", max_shard_size="1GB")
    engine.close()


if __name__ == "__main__":
    here = Path.cwd()
    trainer = TorchTrainer(
        lambda: train(here),
        scaling_config=ScalingConfig(num_workers=2),  # use_gpu=True where there are GPUs
        torch_config=TorchConfig(backend="gloo"),  # without GPUs
        run_config=RunConfig(storage_path=str(here / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    ray.init(include_dashboard=False)
    trainer.fit()
    print("killed and begun again:", (here / "killed").exists())
    alone, *_ = infinity.initialize(model=model(), config=config(here, 2))  # one process, with the data of both
    for micro_batch in range(2 * NUM_STEPS):
        backward(alone, *divmod(micro_batch, 2))
    trained = load_file(here / "trained" / "model.safetensors")
    print("weights equal:", all(torch.equal(trained[name], value) for name, value in alone.module.state_dict().items()))
