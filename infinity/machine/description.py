"""Describes the machine that a figure was measured on, and measures how fast it computes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from swapper.volumes.file_system import describe_drive

_DISTRIBUTIONS = ("infinity-offload", "torch", "numpy", "numba", "transformers")
# Trades precision for the time that `infinity plan` takes.
_MEASURED_SECONDS = 0.2
# Weight, gradient and two states, 16 bytes each: 64 MB, more than most caches hold.
_UPDATED_NUMEL = 1 << 22


def describe_machine(directory: Path) -> dict[str, Any]:
    """Processor, memory, drive, accelerator and versions, as plain values for a table and JSON."""
    drive = describe_drive(directory)
    model = Path(f"/sys/block/{drive.device}/device/model")
    facts: dict[str, Any] = {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "directory": str(directory),
        "drive": f"{drive.words()} {model.read_text().strip()}" if model.exists() else drive.words(),
        "load_average": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none (CPU)",
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    # Not every architecture has a "model name" there; arm64 has none.
    return platform.machine()


def measure_flops_per_second() -> tuple[float, str]:
    """Multiply bf16 matrices; return operations per second, the most that a model can reach, and the device's name."""
    # A product of two n x n matrices takes 2 * n^3 operations: 1.1e12 on a GPU, 2.1e9 on a CPU. Small ones would
    # measure the launch of kernels.
    kind, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 1024)
    left, right = (torch.ones(size, size, dtype=torch.bfloat16, device=kind) for _ in range(2))
    _multiply(left, right)  # the first one chooses a kernel
    times_per_second = _rate(lambda: _multiply(left, right))
    name = torch.cuda.get_device_name(0) if kind == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    return times_per_second * 2 * size**3, name


def measure_updates_per_second() -> float:
    """Run torch's fused AdamW on the CPU; return parameters per second."""
    weight = torch.nn.Parameter(torch.zeros(_UPDATED_NUMEL, dtype=torch.float32, device="cpu"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()  # the first one makes the states
    return _rate(optimizer.step) * _UPDATED_NUMEL


def _rate(call: Callable[[], object]) -> float:
    """How often ``call`` runs in a second."""
    num_times, began = 0, time.perf_counter()
    while time.perf_counter() - began < _MEASURED_SECONDS:
        call()
        num_times += 1
    return num_times / (time.perf_counter() - began)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    left @ right
    if left.is_cuda:
        torch.cuda.synchronize()
