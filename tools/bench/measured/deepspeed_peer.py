"""The measured program on DeepSpeed's side: ZeRO-3, parameters and optimizer on NVMe. Never a dependency."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from .models import Program, Workload, build_model, micro_batches

# Without the launcher DeepSpeed looks for these, and asks for mpi4py when they are missing.
LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
# Elements of a sub-group and of live parameters. Smaller ones take less host memory, and more operations.
_LEAN_ELEMENTS = int(4e7)
_PIPELINES = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}


def make_config(workload: Workload, settings: dict[str, Any], largest_numel: int) -> dict[str, Any]:
    """DeepSpeed's config: `lean` keeps host memory low, `pipelined` is its fastest that does not assert.

    `small` is `lean` for models of any size: with few layers or with checkpointing, 0.19.8 fails where it reads ahead
    ("Not enough buffers 0 for swapping 1"). `gpu` is for a model beside a GPU: see `_beside_gpu`.
    """
    variant = settings["variant"]
    nvme = {"device": "nvme", "nvme_path": settings["directory"], "pin_memory": False}
    # Too small asserts ("More elements than buffer size"), larger costs memory: exactly the largest parameter fits.
    parameters = nvme | {"buffer_size": largest_numel, "buffer_count": 6, "max_in_cpu": 0}
    if variant == "gpu":
        return _beside_gpu(workload, settings, nvme, parameters)
    zero = {
        "sub_group_size": _LEAN_ELEMENTS,
        "stage3_max_live_parameters": _LEAN_ELEMENTS,
        "stage3_max_reuse_distance": _LEAN_ELEMENTS,
        "stage3_prefetch_bucket_size": 0 if variant == "small" else _LEAN_ELEMENTS // 2,
        "offload_param": parameters,
        # AdamW with both pipelines needs three sets of four buffers; 8 and 9 assert.
        "offload_optimizer": nvme | (_PIPELINES if variant == "pipelined" else {}),
    }
    return _config(workload, zero, num_threads=2)


def _beside_gpu(
    workload: Workload, settings: dict[str, Any], nvme: dict[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    """DeepSpeed's config beside a GPU, at its best: pinned buffers, both pipelines, 8 threads of 1 MiB requests.

    Args:
        workload: what is trained.
        settings: ``sub_group`` (elements of a sub-group); ``fp32_gradients``: it accumulates in fp32, as we do, and not in
            its default bf16; ``states``: "nvme", "cpu", or "super" (in RAM, and updated in backward).
        nvme, parameters: of states and of parameters on the drive.
    """
    states, pinned = settings["states"], {"pin_memory": torch.cuda.is_available()}
    offload = nvme | _PIPELINES
    if states != "nvme":
        offload = {"device": "cpu"} | ({"super_offload": True} if states == "super" else {})
    zero: dict[str, Any] = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": int(settings["sub_group"]),
        "stage3_prefetch_bucket_size": int(5e7),
        "stage3_max_live_parameters": int(1e9),
        "stage3_max_reuse_distance": int(1e9),
        "offload_optimizer": offload | pinned,
    }
    if states == "nvme":
        zero["offload_param"] = parameters | pinned | {"buffer_count": 24, "max_in_cpu": int(1e9)}
    gradients = {"data_types": {"grad_accum_dtype": "fp32"}} if settings["fp32_gradients"] else {}
    return _config(workload, zero, num_threads=8) | gradients


def _config(workload: Workload, zero: dict[str, Any], num_threads: int) -> dict[str, Any]:
    requests = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    return workload.config() | {
        "zero_optimization": {"stage": 3} | zero,
        "aio": requests | {"intra_op_parallelism": num_threads},
        # Never: printing is no part of a step.
        "steps_per_print": 10**9,
    }


class _Moved:
    """Bytes of the tensors that go through DeepSpeed's own functions for reads and writes, which all its swappers call."""

    def __init__(self) -> None:
        self.read, self.written = 0, 0
        utils = importlib.import_module("deepspeed.runtime.swap_tensor.utils")
        # Each module has imported the functions by name, so the counting ones have to be put into each.
        for name in ("partitioned_param_swapper", "pipelined_optimizer_swapper", "optimizer_utils", "async_swapper"):
            importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}")
        swappers = [module for name, module in sys.modules.items() if name.startswith("deepspeed.runtime.swap_tensor")]
        for name, way in (("swap_in_tensors", "read"), ("swap_out_tensors", "written")):
            counted = self._counting(getattr(utils, name), way)
            for module in swappers:
                if hasattr(module, name):
                    setattr(module, name, counted)

    def _counting(self, function: Callable[..., Any], way: str) -> Callable[..., Any]:
        def call(handle: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
            setattr(self, way, getattr(self, way) + sum(each.numel() * each.element_size() for each in tensors))
            return function(handle, tensors, *rest, **named)

        return call


class DeepSpeedPeer(Program):
    """Drives a DeepSpeed engine one optimizer step at a time, which ends with its writes done.

    It is not closed: DeepSpeed's own shutdown aborts now and then.
    """

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        os.environ.update(LAUNCHER)
        # Two benchmarks at once would meet at DeepSpeed's default port.
        os.environ["MASTER_PORT"] = str(free_port())
        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
        os.environ["TORCH_EXTENSIONS_DIR"] = settings["extensions_directory"]
        import deepspeed

        on_gpu = settings["variant"] == "gpu"
        self._moved = _Moved() if on_gpu else None
        model = build_model(workload, "cuda" if on_gpu and torch.cuda.is_available() else "cpu")
        self._num_parameters = sum(p.numel() for p in model.parameters())
        # Before `initialize`: with stage 3, DeepSpeed empties the parameters.
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
            # DeepSpeed updates at the last micro-batch, and waits for its writes there.
            self._engine.step()
            total += float(loss.detach())
        return total / self._workload.num_micro_batches

    def moved_bytes(self) -> tuple[int, int] | None:
        """Bytes read and written; None where it was not asked to count them."""
        return None if self._moved is None else (self._moved.read, self._moved.written)

    def describe(self) -> dict[str, Any]:
        return {"num_parameters": self._num_parameters}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        # The kernel chooses a free port. It may be taken again before DeepSpeed binds it, which is unlikely.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
