"""Describes this machine: for plans, its free memory, room on its drives, and their speed; for figures that are measured on
it, its parts. Measures how fast it computes.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.config import InfinityConfig
from infinity.config.schema.directories import existing
from infinity.device.host_memory import free_bytes, is_unified
from infinity.machine.bandwidth_cache import measured_bandwidth, now
from infinity.plan.machine import Bandwidth, Machine, Room, together
from swapper.errors import SwapperError
from swapper.measure.speeds import glance as rate_at_a_glance
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive
from swapper.volumes.run_directory import bytes_of_run

# For `infinity plan` without a profile: short, because it should answer at once.
_SECONDS = 0.3
_DISTRIBUTIONS = ("infinity-offload", "torch", "numpy", "numba", "transformers")
# Trades precision for the time that `infinity plan` takes.
_MEASURED_SECONDS = 0.2
# Weight, gradient and two states, 16 bytes each: 64 MB, more than most caches hold.
_UPDATED_NUMEL = 1 << 22


def this_machine(directories: Sequence[Path], *, asks_gpu: bool = True) -> Machine:
    """Describe this machine, with states in these directories; without its GPU unless ``asks_gpu``.

    Raises:
        VolumeError: a directory cannot be examined.
    """
    free, on_gpu = free_bytes(), None
    if asks_gpu and torch.cuda.is_available():
        on_gpu = torch.cuda.mem_get_info()[0]
        if is_unified():
            # One pool of memory serves both sides. Counted twice, a plan would promise it twice.
            free = on_gpu = free // 2
    return Machine(
        host_free_bytes=free,
        drive_free_bytes=room_bytes([Directory(path) for path in directories]),
        device_free_bytes=on_gpu,
        bandwidth=measured_bandwidth(directories),
    )


def room_bytes(directories: Sequence[Directory]) -> int | None:
    """Return the space that directories have together, including the files of a resumed run; None: no limit.

    Raises:
        VolumeError: a directory cannot be examined.
    """
    return together([_room(each) for each in directories])


def _room(directory: Directory) -> Room:
    drive = describe_drive(existing(directory.path.absolute()))
    # A file system that says 0 bytes has no limit.
    free = drive.free_bytes if drive.total_bytes else None
    # A resumed run writes over its own files, so their bytes count as room.
    return Room(directory, drive.device_number, free, bytes_of_run(directory.path))


def bandwidth_of(config: InfinityConfig) -> Bandwidth | None:
    """Return the measured bandwidth of a config's drives; None if one was never measured.

    Drives of weights and drives of states work in parallel, so their rates add up.
    """
    sections = (config.offload_param, config.offload_optimizer)
    found = [measured_bandwidth(paths) for paths in {s.nvme_paths: None for s in sections if s.device == "nvme"}]
    known = [bandwidth for bandwidth in found if bandwidth is not None]
    # With one set of drives unknown, a sum would be too low.
    if not known or len(known) < len(found):
        return None
    return Bandwidth(
        sum(bandwidth.read_bytes_per_second for bandwidth in known),
        sum(bandwidth.write_bytes_per_second for bandwidth in known),
        sum(bandwidth.mixed_bytes_per_second for bandwidth in known),
        # The older date: the sum is no newer than its oldest part.
        min(bandwidth.measured_at for bandwidth in known),
    )


def glance(directories: Sequence[Path]) -> Bandwidth | None:
    """Measure drives quickly, for a third of a second with 32 MiB written on each; None if that fails.

    `measured_bandwidth` is more accurate: it comes from the long measurement of `infinity profile`.
    """
    try:
        mixed = rate_at_a_glance([Directory(path) for path in directories], _SECONDS)
    except SwapperError:
        return None
    return None if mixed is None else Bandwidth(mixed, mixed, mixed, now())


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
