"""What figures are measured on: processor, versions, how fast the device computes, and how fast it takes copies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swapper.volumes.file_system import describe_drive

FLOPS_PER_PARAMETER = 6
"""Forward and backward of one token: two each for the forward, for the inputs' gradients and for the weights' gradients."""
FLOPS_WITH_CHECKPOINTING = 8
"""With the forward done twice."""
COPY_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
_DISTRIBUTIONS = ("infinity-offload", "torch", "numpy", "numba", "transformers")
_MULTIPLY_SECONDS = 0.2
_COPIES_PER_SAMPLE = 8
_NUM_COPY_SAMPLES = 5


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
    return platform.machine()


def measure_flops_per_second() -> tuple[float, str]:
    """Floating point operations per second of square bf16 matrices, the most that a model can reach, and the device's
    name."""
    kind, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 1024)
    left, right = (torch.ones(size, size, dtype=torch.bfloat16, device=kind) for _ in range(2))
    _multiply(left, right)  # the first one chooses a kernel
    num_times, began = 0, time.perf_counter()
    while time.perf_counter() - began < _MULTIPLY_SECONDS:
        _multiply(left, right)
        num_times += 1
    seconds = time.perf_counter() - began
    name = torch.cuda.get_device_name(0) if kind == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    return num_times * 2 * size**3 / seconds, name


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    left @ right
    if left.is_cuda:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class CopySample:
    """Median speeds of copies of one size between host and GPU; the host memory is pinned."""

    num_bytes: int
    to_device_bytes_per_second: float
    to_host_bytes_per_second: float


def why_no_copies() -> str | None:
    """None if there is a GPU to copy to, else the reason in words."""
    return None if torch.cuda.is_available() else "no CUDA device here: copies between host and GPU were not measured"


def measure_copies() -> Iterator[CopySample]:
    """One sample per size, smallest first. Only where `why_no_copies` says nothing."""
    for num_bytes in COPY_BYTES:
        host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        yield CopySample(num_bytes, _copy_rate(device, host), _copy_rate(host, device))


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second, several copies behind each other."""
    rates = []
    for _ in range(1 + _NUM_COPY_SAMPLES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_COPIES_PER_SAMPLE):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(_COPIES_PER_SAMPLE * source.numel() / (time.perf_counter() - began))
    return statistics.median(rates[1:])  # the first one wakes the device
