"""Trains within the least memory that `infinity.deepspeed.contents.memory_needs` names, and measures it. Run in a process of its own."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.deepspeed.contents.memory_needs import memory_needs
from infinity.device.host_memory import give_back_freed_memory
from infinity.numerics.kernels import kernels
from tests.exactness.faulty_drives import wrapped_drives
from tests.latency import delayed

_WIDTH, _NUM_LAYERS, _NUM_BLOCKS = 1024, 12, 3
_WRITE_SECONDS = 0.1
"""Of each write: computing is faster than that on a machine that is busy otherwise, too."""


def _status(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) << 10


def _model(width: int = _WIDTH) -> nn.Module:
    blocks = (nn.Sequential(*(nn.Linear(width, width) for _ in range(_NUM_LAYERS))) for _ in range(_NUM_BLOCKS))
    return nn.Sequential(*blocks).bfloat16()


def _train(model: nn.Module, directory: str, budget_bytes: int, write_seconds: float) -> int:
    """The most memory while it trains, as the kernel counts it, without what is mapped of files (libraries)."""
    nvme = {"device": "nvme", "nvme_path": directory}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory_budget": budget_bytes},
    }
    width = next(model.parameters()).shape[1]
    # Slow writes: what waits to be written is in memory for long, so that the peak does not depend on the drive.
    slow = wrapped_drives(lambda inner: delayed(inner, write_seconds=write_seconds))
    with slow, infinity.initialize(model=model, config=config)[0] as engine:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        files_bytes = _status("RssFile")  # the system may take some of it away meanwhile
        for _ in range(2):
            engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().mean())
            engine.step()
        engine.flush()
        return _status("VmHWM") - max(files_bytes, _status("RssFile"))


def run(directory: str) -> None:
    """Print how many bytes were needed, and how many were taken."""
    torch.set_num_threads(1)
    kernels()
    _train(_model(width=64), directory, 16 << 20, 0.0)
    with torch.device("meta"):
        need = next(each for each in memory_needs(_model()) if each.is_on_cpu)
    gc.collect()  # the engine before, which is closed, and its model
    give_back_freed_memory()
    before = _status("RssAnon")
    taken = _train(_model(), directory, need.budget_bytes, _WRITE_SECONDS) - before
    print(json.dumps({"needed": need.host_bytes, "taken": taken}))


if __name__ == "__main__":
    run(sys.argv[1])
