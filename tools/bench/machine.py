"""What the figures were measured on: machine, operating system, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .cgroup import block_device
from .participant import ENVIRONMENT

_DISTRIBUTIONS = ("infinity-offload", "torch", "numpy", "numba", "transformers")


def describe_machine(directory: Path) -> dict[str, Any]:
    """Processor, memory, drive, accelerator and versions, as plain values for the table and the JSON."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "directory": str(directory),
        "drive": _drive(directory),
        "load_average": os.getloadavg()[0],
        "revision": _revision(),
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["accelerator"] = _accelerator()
    facts["environment"] = ", ".join(f"{name}={os.environ.get(name, value)}" for name, value in ENVIRONMENT.items())
    return facts


def version_in(python: str, distribution: str) -> str | None:
    """Version of `distribution` in another interpreter's environment, None if it is not installed there."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _drive(directory: Path) -> str:
    device = block_device(directory)
    if device is None:
        return "no block device"
    entry = Path(f"/sys/dev/block/{device[0]}:{device[1]}").resolve()
    model = entry / "device" / "model"
    return f"{entry.name} {model.read_text().strip()}" if model.exists() else entry.name


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none (CPU)"


def _revision() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"
