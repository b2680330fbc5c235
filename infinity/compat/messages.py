"""What scripts log through DeepSpeed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from infinity.accelerator import get_accelerator

logger = logging.getLogger("infinity.script")
"""The script's own: as with DeepSpeed, what it says from INFO on goes to the standard output."""
logger.setLevel(logging.INFO)
logger.propagate = False
logger.addHandler(logging.StreamHandler(sys.stdout))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log, if ``ranks`` has this process, which is 0, or is None or has -1."""
    if ranks is None or {0, -1} & set(ranks):
        logger.log(level, "[Rank 0] %s", message)


def see_memory_usage(message: str, force: bool = False, **_: Any) -> None:
    """With ``force``, log what is used of the GPU's and the machine's memory, in GiB."""
    if force:
        memory, accelerator = psutil.virtual_memory(), get_accelerator()
        logger.info(
            "%s: GPU %.2f (most so far %.2f), machine %.2f of %.2f GiB",
            message,
            accelerator.memory_allocated() / (1 << 30),
            accelerator.max_memory_allocated() / (1 << 30),
            (memory.total - memory.available) / (1 << 30),
            memory.total / (1 << 30),
        )
