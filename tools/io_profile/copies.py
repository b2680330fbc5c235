"""Copies between host memory and the GPU: the other road that every parameter takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
_COPIES_PER_SAMPLE = 8
_NUM_SAMPLES = 5


@dataclass(frozen=True)
class CopySample:
    """Median speeds of copies of one size; the host memory is pinned."""

    num_bytes: int
    to_device_bytes_per_second: float
    to_host_bytes_per_second: float


def why_not() -> str | None:
    """None if there is a GPU to copy to, else the reason in words."""
    return None if torch.cuda.is_available() else "no CUDA device here: copies between host and GPU were not measured"


def measure_copies() -> Iterator[CopySample]:
    """One sample per size, smallest first. Only where `why_not` says nothing."""
    for num_bytes in SIZES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        yield CopySample(num_bytes, _rate(device, host), _rate(host, device))


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second, several copies behind each other."""
    rates = []
    for _ in range(1 + _NUM_SAMPLES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_COPIES_PER_SAMPLE):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(_COPIES_PER_SAMPLE * source.numel() / (time.perf_counter() - began))
    return statistics.median(rates[1:])  # the first one wakes the device
