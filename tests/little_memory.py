"""What processes have in common that live in a memory control group of little more than their budget."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.internals import compile_kernels, trim_heap


def anonymous_bytes() -> int:
    """Of memory that this process has, but for files."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def settled_bytes() -> int:
    """The same when what was freed has gone back."""
    gc.collect()
    trim_heap()
    return anonymous_bytes()


class Peak(threading.Thread):
    """The most anonymous memory that this process has had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self.num_bytes = 0

    def run(self) -> None:
        while not self._ends.wait(0.01):
            self.num_bytes = max(self.num_bytes, anonymous_bytes())

    def end(self) -> int:
        self._ends.set()
        self.join()
        return self.num_bytes


def load_libraries() -> None:
    """All of numba and torch that a training comes to need: torch loads its compiler with the first optimizer."""
    compile_kernels()
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)


def config_on(directory: str, *, is_bf16: bool = True, **own: Any) -> dict[str, Any]:
    """Everything on a drive, in 16 bits; ``own`` is the block `infinity`."""
    place = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": is_bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": dict(place)},
        "infinity": own,
    }
