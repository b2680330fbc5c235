"""How fast the present device computes: a short matrix multiplication."""

from __future__ import annotations

import time

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.5
FLOPS_PER_PARAMETER = 6
"""Forward and backward of one token: two each for the forward, for the inputs' gradients and for the weights' gradients."""
FLOPS_WITH_CHECKPOINTING = 8
"""With the forward done twice."""


def measure_flops_per_second(dtype: torch.dtype = torch.bfloat16) -> tuple[float, str]:
    """Floating point operations per second of square matrices, and the device's name: the most that a model can reach."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size = _SIZES[kind]
    left, right = (torch.ones(size, size, dtype=dtype, device=kind) for _ in range(2))
    _multiply(left, right)  # the first one chooses a kernel
    num_times, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        _multiply(left, right)
        num_times += 1
    seconds = time.perf_counter() - began
    name = torch.cuda.get_device_name(0) if kind == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    return num_times * 2 * size**3 / seconds, name


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    left @ right
    if left.is_cuda:
        torch.cuda.synchronize()
