"""One rank of ``infinity bench ranks``, with what it is to do as JSON in its argument. Its answer goes to a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch

import infinity
from infinity.distributed.world import world
from infinity.tiers.state_store import PagedStateStore


def config_of(asked: dict[str, Any]) -> dict[str, Any]:
    """States on the rank's drive and, in stage 3, weights; all gradients fit into memory."""
    drive = {"device": "nvme", "nvme_path": asked["directory"]}
    zero = {"stage": asked["stage"], "offload_optimizer": drive}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": asked["dtype"] == "bfloat16"},
        "gradient_clipping": asked["clip"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero | ({"offload_param": drive} if asked["stage"] == 3 else {}),
        "infinity": {"keep_in_memory": False, "progress_bars": False, "host_memory_budget": asked["budget"]},
    }


def measure(asked: dict[str, Any]) -> dict[str, float]:
    """Train a step to warm up and as many as asked, and return the bytes of one of them, and what is kept.

    Kept gradients are the means, as far as they have come to this rank.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, layers = asked["width"], asked["layers"]
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False, dtype=torch.float32, device="cpu") for _ in range(layers))
    )
    for weight in model.parameters():  # or what goes through many layers dies away, and moments are denormal numbers
        torch.nn.init.normal_(weight, std=width**-0.5)
    engine = infinity.initialize(model=model, config=config_of(asked))[0]
    storage, x = engine._parts.storage, torch.ones(1, width, dtype=getattr(torch, asked["dtype"]), device="cpu")

    def train(num_steps: int) -> tuple[float, float]:
        infinity.comm.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.flush()
        infinity.comm.barrier()
        return (time.perf_counter() - began) / num_steps, (time.process_time() - used) / num_steps

    train(1)
    before, sent = storage.counters(), world().sent_bytes.copy()
    seconds, processor_seconds = train(asked["steps"])
    after, moved = storage.counters(), world().sent_bytes - sent
    # Of what it has the mean, others send a rank their parts; in stage 0, where it is told of all, it sends as much again.
    means = moved["gradients"] / max(world().num - 1, 1) * (world().num / 2 if asked["stage"] == 0 else 1)
    records = cast(PagedStateStore, storage.records)
    extents = [each.extent for each in records._records.values() if each.extent is not None]
    found = {
        "parameters": float(sum(kinds.get("weights", 0) for kinds in storage.resting_bytes().values())),
        "gradients": means / asked["steps"],
        "optimizer": float(sum(extent.num_bytes for extent in extents)),
        "read": (after.read_bytes - before.read_bytes) / asked["steps"],
        "written": (after.write_bytes - before.write_bytes) / asked["steps"],
        "sent": sum(moved[kind] for kind in ("gradients", "weights", "fetches")) / asked["steps"],
        "seconds": seconds,
        "processor": processor_seconds,
    }
    engine.close(restore_weights=False)
    return found


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    infinity.init_distributed(
        "gloo", init_method=f"file://{wanted['store']}", rank=wanted["rank"], world_size=wanted["num"]
    )
    Path(wanted["answer"]).write_text(json.dumps(measure(wanted)))
