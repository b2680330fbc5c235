"""Writes checkpoints with DeepSpeed itself; run by a Python that has it (0.19), never imported by a test.

    PYTHON_WITH_DEEPSPEED write.py DIRECTORY '{"stage": 2, "dtype": "bf16", ...}'

The keys are the fields of `Case`; ``pack.py`` writes those of `KEPT`. DIRECTORY/checkpoint gets the checkpoint,
DIRECTORY/expected.pt what DeepSpeed itself says was in it and how it went on: per parameter the fp32 weight and the moments,
and the losses of the next steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import nn

NUM_STEPS_BEFORE = 3
NUM_STEPS_AFTER = 3
WIDTH = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint."""

    stage: int = 2
    world_size: int = 1
    dtype: str = "fp32"
    offload: str | None = None
    universal: bool = False
    optimizer: str = "AdamW"
    groups: int = 1
    frozen: bool = False
    tied: bool = False
    scheduler: bool = True
    accumulation_steps: int = 1
    sub_group_size: int = 1_000_000_000
    torch_adam: bool = True
    clipping: float = 1.0


KEPT = {
    "stage1": Case(stage=1, clipping=0.0, scheduler=False),
    "stage1-bf16": Case(stage=1, world_size=2, dtype="bf16", frozen=True, tied=True, universal=True),
    "stage2": Case(stage=2, world_size=2, groups=2, universal=True),
    "stage2-fp16": Case(stage=2, dtype="fp16", groups=2, offload="cpu", accumulation_steps=2),
    "stage3": Case(stage=3, world_size=2, groups=2, sub_group_size=40, universal=True),
    "stage3-bf16": Case(stage=3, world_size=2, dtype="bf16", frozen=True, groups=2, torch_adam=False, offload="cpu"),
}
"""Those whose files are kept beside this script."""


class Tiny(nn.Module):
    """Odd sizes, so that every kind of padding occurs; a buffer; a scalar parameter."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((WIDTH,), 0.125))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.embed(tokens) + self.shift.to(self.embed.weight.dtype)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden) * self.scale


def build(case: Case) -> Tiny:
    """The model of a case, as it is before the first step."""
    torch.manual_seed(1)
    model = Tiny(tied=case.tied)
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith("blocks.0")
    return model


def param_groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the others, with hyperparameters of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.groups == 1:
        return [{"params": trained}]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def batch(step: int) -> torch.Tensor:
    """The same on each rank, so that any number of ranks gives the same mean."""
    return torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(100 + step))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def config_of(case: Case, directory: Path) -> dict[str, Any]:
    """DeepSpeed's."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.stage == 3:
        zero |= {"sub_group_size": case.sub_group_size, "stage3_param_persistence_threshold": 0}
    if case.offload:
        zero["offload_optimizer"] = {"device": case.offload, "nvme_path": str(directory / "nvme"), "pin_memory": False}
    params = {"lr": 1e-2, "torch_adam": case.torch_adam}
    if case.optimizer == "AdamW":
        params |= {"weight_decay": 0.05}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation_steps,
        "optimizer": {"type": case.optimizer, "params": params},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_clipping": case.clipping,
    }
    if case.scheduler:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 5},
        }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    return config


def train(engine: Any, case: Case, steps: range) -> Iterator[float]:
    """Losses of micro-batches."""
    for step in steps:
        for micro in range(case.accumulation_steps):
            tokens = batch(step * case.accumulation_steps + micro)
            loss = loss_of(engine(tokens.to(engine.device)), tokens.to(engine.device))
            engine.backward(loss)
            engine.step()
            yield loss.item()


def run(rank: int, case: Case, directory: Path, port: int) -> None:
    """One rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.set_num_threads(1)
    if case.dtype == "fp16":  # torch computes it on a CPU as well
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    model = build(case)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(case, model), config=config_of(case, directory)
    )
    before = list(train(engine, case, range(NUM_STEPS_BEFORE)))
    engine.save_checkpoint(str(directory / "checkpoint"), client_state={"epoch": 3, "note": ("a", 1.5)})
    weights, states = {}, {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=case.stage == 3):
                weights[name] = parameter.detach().cpu().clone()
            continue
        weights[name] = safe_get_full_fp32_param(parameter).cpu().clone()
        if case.stage == 3:  # in stages 1 and 2, the moments are not always found there: `universal` has them
            states[name] = {
                key: safe_get_full_optimizer_state(parameter, key).cpu().clone() for key in ("exp_avg", "exp_avg_sq")
            }
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    counters = {
        name: getattr(engine, name) for name in ("global_steps", "micro_steps", "skipped_steps", "global_samples")
    }
    scale = engine.optimizer.loss_scaler.cur_scale if case.dtype == "fp16" else None
    lrs = engine.get_lr()
    after = list(train(engine, case, range(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_AFTER)))
    final = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            final[name] = safe_get_full_fp32_param(parameter).cpu().clone()
    if rank == 0:
        expected = {"weights": weights, "states": states, "buffers": buffers, "counters": counters, "scale": scale}
        expected |= {"before": before, "after": after, "final": final, "lrs": lrs}
        torch.save(expected, directory / "expected.pt")
    if case.world_size > 1:
        deepspeed.comm.barrier()
        os._exit(0)


def main() -> None:
    """Writes one checkpoint."""
    directory, case = Path(sys.argv[1]), Case(**json.loads(sys.argv[2]))
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if case.world_size == 1:
        run(0, case, directory, port)
    else:
        multiprocessing.spawn(run, args=(case, directory, port), nprocs=case.world_size)
    if case.universal:
        from deepspeed.checkpoint.ds_to_universal import main as to_universal

        tag = (directory / "checkpoint" / "latest").read_text().strip()

        class Arguments:
            input_folder = str(directory / "checkpoint" / tag)
            output_folder = str(directory / "checkpoint" / f"{tag}_universal")
            num_extract_workers = num_merge_workers = 1
            keep_temp_folder = False
            strict = True
            inject_missing_state = True

        to_universal(Arguments)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's own shutdown aborts now and then
