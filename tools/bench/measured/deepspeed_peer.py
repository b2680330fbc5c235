"""The measured program on DeepSpeed's side: ZeRO-3, parameters and optimizer on NVMe. Never a dependency."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from .models import Program, Workload, build_model, micro_batches

# Without the launcher DeepSpeed looks for these, and asks for mpi4py when they are missing.
_LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_LEAN_ELEMENTS = int(4e7)


def make_config(workload: Workload, settings: dict[str, Any], largest_numel: int) -> dict[str, Any]:
    """DeepSpeed's config: `lean` keeps host memory low, `pipelined` is its fastest that does not assert.

    `small` is `lean` for models of any size: with few layers or with checkpointing, 0.19.8 fails where it reads ahead
    ("Not enough buffers 0 for swapping 1").
    """
    offload_param = {
        "device": "nvme",
        "nvme_path": settings["directory"],
        "pin_memory": False,
        # Too small asserts ("More elements than buffer size"), larger costs memory: exactly the largest parameter fits.
        "buffer_size": largest_numel,
        "buffer_count": 6,
        "max_in_cpu": 0,
    }
    offload_optimizer = {"device": "nvme", "nvme_path": settings["directory"], "pin_memory": False}
    if settings["variant"] == "pipelined":
        # AdamW with both pipelines needs three sets of four buffers; 8 and 9 assert.
        offload_optimizer |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    return workload.config() | {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": _LEAN_ELEMENTS,
            "stage3_max_live_parameters": _LEAN_ELEMENTS,
            "stage3_max_reuse_distance": _LEAN_ELEMENTS,
            "stage3_prefetch_bucket_size": 0 if settings["variant"] == "small" else _LEAN_ELEMENTS // 2,
            "offload_param": offload_param,
            "offload_optimizer": offload_optimizer,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }


class DeepSpeedPeer(Program):
    """Drives a DeepSpeed engine one optimizer step at a time, which ends with its writes done.

    It is not closed: DeepSpeed's own shutdown aborts now and then.
    """

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        os.environ.update(_LAUNCHER)
        os.environ["MASTER_PORT"] = str(_free_port())
        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
        os.environ["TORCH_EXTENSIONS_DIR"] = settings["extensions_directory"]
        import deepspeed

        model = build_model(workload)
        self._num_parameters = sum(p.numel() for p in model.parameters())
        largest = max(p.numel() for p in model.parameters())
        config = make_config(workload, settings, largest)
        self._engine, *_ = deepspeed.initialize(model=model, config=config)
        self._workload = workload
        self._batches = micro_batches(workload, self._engine.device)

    def step(self) -> float:
        total = 0.0
        for _ in range(self._workload.num_micro_batches):
            loss = self._engine(**next(self._batches)).loss
            self._engine.backward(loss)
            self._engine.step()
            total += float(loss.detach())
        return total / self._workload.num_micro_batches

    def describe(self) -> dict[str, Any]:
        return {"num_parameters": self._num_parameters}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
