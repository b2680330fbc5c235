"""A training that limits its own memory control group to what its budget promises, and then has to live with that."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.internals import MemoryGroup
from tests.little_memory import anonymous_bytes, config_on, load_libraries, settled_bytes

BUDGET_BYTES = 240_000_000
LONG_BUDGETS = {"memory": 48 << 20, "nvme": 48 << 20, "cpu": 700 << 20}
"""Of `train_on_long_sequences`, by where activations are: with "cpu" they are part of it."""
NUM_STEPS = 2
"""Nothing is known of the model in the first step; the second is like all that follow."""
_WIDTH, _NUM_RESULTS, _NUM_TOKENS, _NUM_BLOCKS = 1024, 32_000, 2, 4
_SAVING_BYTES = _WIDTH * _NUM_RESULTS * 2 + (48 << 20)
"""The head's flat buffer, which is part of the budget but may have been given back, and less than a copy of the head."""


class Block(nn.Module):
    """About 17 MB in bf16, in parameters of a size that the C library takes from its heap."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Its largest parameter alone has 65 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, _NUM_RESULTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def _load_libraries() -> None:
    """And what backward in 16 bits loads."""
    load_libraries()
    small = nn.Linear(64, 64).bfloat16()
    small(torch.ones(8, 64).bfloat16()).sum().backward()


def _plain_bytes() -> int:
    """What plain torch needs at its peak besides weights: the head's gradient, its results in bf16 and fp32, and theirs. Where
    the processor multiplies no bf16, the gradient in fp32 as well."""
    head = nn.Linear(_WIDTH, _NUM_RESULTS, bias=False, dtype=torch.bfloat16)
    x = torch.ones(1, _NUM_TOKENS, _WIDTH, dtype=torch.bfloat16, requires_grad=True)
    before = anonymous_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    head(x).float().square().mean().backward()
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = ((int(status[name].split()[0]) << 10) for name in ("VmHWM", "RssFile"))
    return peak - files - before


def _make_model() -> Model:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Model()
    finally:
        torch.set_default_dtype(torch.float32)


def _batches() -> Iterator[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield (torch.randn(1, _NUM_TOKENS, _WIDTH, generator=generator).bfloat16(),)


def train(group: str, directory: str, slack_bytes: int, changes: dict[str, Any]) -> None:
    """Print a line of JSON in the end, if the kernel has let it come that far.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive.
        slack_bytes: what it may use beyond libraries, activations and budget.
        changes: to the config.
    """
    if str(os.getpid()) not in (Path(group) / "cgroup.procs").read_text().split():
        raise RuntimeError(f"this process is not in {group}")
    torch.set_num_threads(1)
    _load_libraries()
    plain_bytes = _plain_bytes()
    memory = MemoryGroup(Path(group))
    memory.limit(settled_bytes() + plain_bytes + BUDGET_BYTES + slack_bytes)
    own = {"host_memory_budget": BUDGET_BYTES, **changes.get("infinity", {})}
    config = {**config_on(directory), "gradient_clipping": 0.0, **changes, "infinity": own}
    with infinity.initialize(model=_make_model(), config=config)[0] as engine:
        data = _batches()
        for _ in range(NUM_STEPS):
            engine.train_batch(itertools.islice(data, engine.gradient_accumulation_steps()))
        answer = {
            "update": engine.config.infinity.update,
            "schedule": engine.report.schedule if engine.report is not None else "",
        }
        engine.flush()
        memory.limit(settled_bytes() + _SAVING_BYTES)
        engine.save_16bit_model(Path(directory) / "weights")
    print(json.dumps(answer))


def save(group: str, directory: str, slack_bytes: int) -> None:
    """Make, save and load the model's state dict and the optimizer's, with no more memory than ``slack_bytes`` for each.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive.
        slack_bytes: what it may use beyond what the process has when a step has ended.
    """
    torch.set_num_threads(1)
    _load_libraries()
    config = config_on(directory, host_memory_budget=BUDGET_BYTES, keep_in_memory=False)
    engine, optimizer, *_ = infinity.initialize(model=_make_model(), config=config)
    with engine:
        engine.train_batch(_batches())
        engine.flush()
        num_bytes: list[int] = []
        for owner in (engine.module, optimizer):
            file = Path(directory) / f"saved{len(num_bytes)}.pt"
            MemoryGroup(Path(group)).limit(settled_bytes() + slack_bytes)
            torch.save(owner.state_dict(), file)
            owner.load_state_dict(torch.load(file, mmap=True))
            num_bytes.append(file.stat().st_size)
        print(json.dumps({"num_bytes": num_bytes}))


def train_on_long_sequences(group: str, directory: str, activations: str) -> None:
    """Print the loss and the most memory that the process's control group took in steps with many activations.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive.
        activations: the config's ``infinity.activations``.
    """
    torch.set_num_threads(1)
    _load_libraries()
    own = {"host_memory_budget": LONG_BUDGETS[activations], "activations": activations}
    config = {**config_on(directory, is_bf16=False, **own), "gradient_clipping": 0.0}
    torch.manual_seed(0)
    width, num_tokens, num_blocks = 256, 4096, 24
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(num_blocks)]
    with infinity.initialize(model=nn.Sequential(*blocks), config=config)[0] as engine:
        x = torch.randn(1, num_tokens, width)
        before = settled_bytes()
        memory = MemoryGroup(Path(group))
        memory.reset_peak()
        for _ in range(2):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
        engine.flush()
        peak = memory.peak_bytes
        saved = 3 * num_blocks * num_tokens * width * 4
        print(json.dumps({"loss": loss.item(), "peak_bytes": peak - before, "activation_bytes": saved}))
