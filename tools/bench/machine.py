"""What the figures were measured on: machine, operating system, versions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from bench.participant import ENVIRONMENT
from infinity.machine import description


def describe_machine(directory: Path) -> dict[str, Any]:
    """Processor, memory, drive, accelerator and versions, as plain values for the table and the JSON."""
    environment = ", ".join(f"{name}={os.environ.get(name, value)}" for name, value in ENVIRONMENT.items())
    return description.describe_machine(directory) | {"revision": _revision(), "environment": environment}


def version_in(python: str, distribution: str) -> str | None:
    """Version of `distribution` in another interpreter's environment, None if it is not installed there."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _revision() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"
