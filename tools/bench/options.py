"""Options that several benchmarks share, what they refuse before anything runs, and what they say of the machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cgroup import block_device, why_unavailable
from bench.participant import ENVIRONMENT
from infinity.config.schema.quantities import parse_bytes
from infinity.machine import here

_BUILD_DIR = Path("~/.cache/infinity-offload/peer_extensions")


def several(convert: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of lists such as ``1,2,3``, whose parts ``convert`` reads."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(convert(part.strip()) for part in text.split(","))
        except ValueError:
            problem = f"{text!r} cannot be measured; give one or several, such as {example}"
            raise argparse.ArgumentTypeError(problem) from None

    return parse


def at_least_one(text: str) -> int:
    """Parse a whole number above 0."""
    if (number := int(text)) < 1:
        raise ValueError(f"{text} is below 1")
    return number


def size(text: str) -> int:
    """Parse a size such as ``1.5GB`` to bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options for dtype, peer, drive and results."""
    add = parser.add_argument
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="some processors are faster in float32")
    add("--peer", choices=["deepspeed"], help="takes turns with us")
    add("--peer-python", default=sys.executable, help="Python of the environment that holds the peer")
    add("--peer-build-dir", type=Path, default=_BUILD_DIR.expanduser(), help="keeps what the peer compiles")
    add("--nvme-path", type=Path, default=Path(), help="on the drive (default: the present directory)")
    add("--json", type=Path, dest="json_file", metavar="FILE", help="write the results there; - is stdout")


def refuse(parser: argparse.ArgumentParser, given: argparse.Namespace, **controllers: tuple[bool, str, str]) -> None:
    """End the process with the cure if this cannot be measured here.

    Args:
        given: the options of `add_common`.
        controllers: by the name of a control group's controller, whether it is needed, which option asks for it, and
            what to do without.
    """
    path, python = given.nvme_path, given.peer_python
    # Overlay and tmpfs: the kernel counts no bytes of them in /proc/PID/io.
    if block_device(path) is None:
        problem = f"--nvme-path {path} lies on no block device, so its bytes could not be counted"
        parser.error(f"{problem}; name a directory on a drive")
    for controller, (is_needed, option, cure) in controllers.items():
        if is_needed and (reason := why_unavailable(controller)) is not None:
            parser.error(f"{option} cannot be used: {reason}; {cure}")
    if given.peer and (shutil.which(python) is None or version_in(python, given.peer) is None):
        parser.error(f"{given.peer} is not installed for {python}; name another with --peer-python")


def describe_machine(directory: Path) -> dict[str, Any]:
    """Processor, memory, drive, accelerator and versions, as plain values for the table and the JSON."""
    # Variables that all participants get, see `participant.ENVIRONMENT`.
    environment = ", ".join(f"{name}={os.environ.get(name, value)}" for name, value in ENVIRONMENT.items())
    return here.describe_machine(directory) | {"revision": revision(), "environment": environment}


def version_in(python: str, distribution: str) -> str | None:
    """Version of `distribution` in another interpreter's environment, None if it is not installed there."""
    # Asks for the metadata alone: importing DeepSpeed takes seconds, and may fail without a GPU.
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def revision() -> str:
    """Return the commit of this checkout; "unknown" without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"
