"""Trains a model whose states are several times what its control group allows, and saves and loads it. A process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.internals import Checkpoint, MemoryGroup
from tests.little_memory import config_on, load_libraries, settled_bytes

_BUDGET_BYTES = 112 << 20
_SLACK_BYTES = 128 << 20
"""Beyond the budget: activations, what torch keeps, and the blocks that a save has under way."""
_WIDTH, _NUM_LAYERS = 1024, 64


def run(group: str, directory: str) -> None:
    """In a process of its own, inside the control group: train, save, walk the states, load. Prints JSON."""
    torch.set_num_threads(1)
    load_libraries()
    config = config_on(directory, host_memory_budget=_BUDGET_BYTES)
    limit = settled_bytes() + _SLACK_BYTES + _BUDGET_BYTES
    with infinity.Init(config=config):
        model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)])
    engine = infinity.initialize(model=model, config=config)[0]
    saved = Path(directory) / "saved"
    with engine:
        _step(engine)
        engine.flush()
        MemoryGroup(Path(group)).limit(limit)
        engine.save_checkpoint(saved, tag="at once")
        _walk(engine)
        engine.save_checkpoint(saved, tag="meanwhile", blocking=False)
        _step(engine)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(saved, tag="meanwhile")
        engine.flush()
    checkpoints = [Checkpoint.open(saved, tag) for tag in ("at once", "meanwhile")]
    is_same = _sums(checkpoints[0]) == _sums(checkpoints[1])
    num_bytes = sum(tensor.num_bytes for tensor in checkpoints[0].tensors)
    print(json.dumps({"is_same": is_same, "num_bytes": num_bytes, "allowed": _SLACK_BYTES + _BUDGET_BYTES}))


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, _WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def _walk(engine: Any) -> None:
    """Read and assign all states, and load them, as scripts do it, all of one parameter at a time."""
    optimizer = engine.optimizer
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}
        state["exp_avg"] = state["exp_avg"] * 1
    optimizer.load_state_dict(optimizer.state_dict())


def _sums(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    return {(each.fqn, each.kind): each.checksum for each in checkpoint.tensors}
