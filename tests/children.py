"""Python processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    *words: str | Path, cwd: Path = ROOT, timeout_seconds: float = 560.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words behind it, and wait for its end. It finds the packages and the tests."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    values = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | values,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
