"""A Llama that is built, taken over and trained, in a memory control group that is smaller than its parameters."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity
from tests.internals import MemoryGroup, has_drive_tensors
from tests.little_memory import Peak, config_on, load_libraries, settled_bytes

BUDGET_BYTES = 190_000_000
SLACK_BYTES = 150_000_000
"""Activations, the largest parameter while it moves, what is on its way to the drive, and the heap."""
NUM_STEPS = 2


def _sums(model: torch.nn.Module) -> list[int]:
    """Of each parameter's bits."""
    return [int(p.detach().view(torch.int32).sum()) for p in model.parameters()]


def run(group: str | None, directory: str, num_layers: int) -> None:
    """Print a line of JSON: sums of the weights as built, losses, and the peak of memory while they are built.

    Args:
        group: directory of the memory control group that this process is in, which it limits. None: build in memory.
        directory: on a drive.
        num_layers: of the model.
    """
    torch.set_num_threads(2)
    load_libraries()
    config = config_on(directory, host_memory_budget=BUDGET_BYTES, main_weights="remainder")
    shape = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=num_layers, num_attention_heads=8, vocab_size=16_000
    )
    with torch.device("meta"):
        num_bytes = 4 * sum(p.numel() for p in transformers.LlamaForCausalLM(shape).parameters())
    before = settled_bytes()
    bound = contextlib.nullcontext()
    if group is not None:
        bound = infinity.Init(config=config)
        MemoryGroup(Path(group)).limit(before + BUDGET_BYTES + SLACK_BYTES)
    peak = Peak()
    peak.start()
    torch.manual_seed(0)
    with bound:
        model = transformers.LlamaForCausalLM(shape)
    answer: dict[str, Any] = {"parameters_bytes": num_bytes, "built_bytes": peak.end() - before, "sums": _sums(model)}
    engine, *_ = infinity.initialize(model=model, config=config)
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
    print(json.dumps(answer))
