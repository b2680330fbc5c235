"""Real text for the scripts: Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def rows(num: int, length: int, *, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """``num`` samples for a causal model of bytes: ``input_ids`` and ``labels``, each (length,) int64."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    found = []
    for index in range(first, first + num):
        ids = torch.tensor(list(text[index * length : (index + 1) * length]))
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found
