"""Runs fio, which the benchmark compares with: what drives do without us."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

_PATIENCE_SECONDS = 120.0
Wrap = Callable[..., list[str]]


class FioFailed(RuntimeError):
    """fio cannot do this here; the message is what it said."""


def is_available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def run(*options: str, wrap: Wrap | None = None, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """One run; returns fio's report of each job.

    Args:
        options: of fio, one for each word.
        wrap: gives the command that runs a program in a control group.
        environment: of fio; None: this process's.

    Raises:
        FioFailed: with fio's own words.
    """
    command = ["fio", "--output-format=json", "--eta=never", *options]
    process = subprocess.Popen(
        wrap(*command) if wrap is not None else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for us; what fio does then would count as a result
    )
    try:
        stdout, stderr = process.communicate(timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise FioFailed(f"no answer after {_PATIENCE_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        told = [line.strip() for line in (stderr or stdout).splitlines() if line.strip()]
        raise FioFailed(told[0] if told else f"exit code {process.returncode}")
    try:
        jobs: list[dict[str, Any]] = json.loads(stdout[stdout.index("{") :])["jobs"]
    except (ValueError, KeyError) as error:
        raise FioFailed(f"its output cannot be read ({error}): {stdout[:200]!r}") from error
    if errors := [job["error"] for job in jobs if job["error"]]:
        raise FioFailed(os.strerror(errors[0]))
    return jobs
