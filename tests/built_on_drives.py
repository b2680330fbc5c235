"""A Llama that is built, taken over and trained, in a memory control group that is smaller than its parameters."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity
from tests.internals import Cgroup, MemoryGroup, compile_kernels, give_back_freed_memory, has_drive_tensors

BUDGET_BYTES = 190_000_000
SLACK_BYTES = 150_000_000
"""Activations, the largest parameter while it moves, what is on its way to the drive, and the heap."""
NUM_STEPS = 2


def _config(directory: str, budget_bytes: int) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"host_memory_budget": budget_bytes, "main_weights": "remainder"},
    }


def _anonymous_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


class _Peak(threading.Thread):
    """The most anonymous memory that this process has had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self.num_bytes = 0

    def run(self) -> None:
        while not self._ends.wait(0.01):
            self.num_bytes = max(self.num_bytes, _anonymous_bytes())

    def end(self) -> int:
        self._ends.set()
        self.join()
        return self.num_bytes


def _sums(model: torch.nn.Module) -> list[int]:
    """Of each parameter's bits."""
    return [int(p.detach().view(torch.int32).sum()) for p in model.parameters()]


def run(
    group: str | None,
    directory: str,
    num_layers: int = 8,
    width: int = 1024,
    limit: int | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> None:
    """Print a line of JSON: sums of the weights as built, losses, and peaks of memory.

    Args:
        group: directory of the memory control group that this process is in, which it limits. None: build in memory.
        directory: on a drive.
        num_layers: of the model.
        width: of the model.
        limit: of the group, in bytes. None: what it has after its imports, budget and slack.
        budget_bytes: of the engine.
    """
    torch.set_num_threads(2)
    compile_kernels()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    shape = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        vocab_size=16_000,
    )
    with torch.device("meta"):
        num_bytes = 4 * sum(p.numel() for p in transformers.LlamaForCausalLM(shape).parameters())
    gc.collect()
    give_back_freed_memory()
    before = _anonymous_bytes()
    bound = contextlib.nullcontext()
    if group is not None:
        bound = infinity.Init(config=_config(directory, budget_bytes))
        limit = limit or before + budget_bytes + SLACK_BYTES
        memory = MemoryGroup(Path(group))
        memory.limit(limit)
        memory.reset_peak()
    peak = _Peak()
    peak.start()
    torch.manual_seed(0)
    with bound:
        model = transformers.LlamaForCausalLM(shape)
    answer: dict[str, Any] = {"parameters_bytes": num_bytes, "built_bytes": peak.end() - before, "sums": _sums(model)}
    peak = _Peak()
    peak.start()
    engine, *_ = infinity.initialize(model=model, config=_config(directory, budget_bytes))
    answer["initialized_bytes"] = peak.end() - before
    answer["is_left"] = has_drive_tensors()
    with engine:
        tokens = torch.arange(4).reshape(1, 4)
        losses = []
        for _ in range(NUM_STEPS):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        answer["losses"] = losses
    if group is not None:
        answer["group_bytes"] = memory.peak_bytes
        answer["limit_bytes"] = limit
    print(json.dumps(answer))


if __name__ == "__main__":  # by hand: DIRECTORY LAYERS WIDTH LIMIT BUDGET, in a group of its own
    with Cgroup("build", ("memory",)) as made, made.joined():
        sizes = [int(float(given)) for given in sys.argv[2:]]
        run(str(made.task_files[0].parent), sys.argv[1], *sizes)
