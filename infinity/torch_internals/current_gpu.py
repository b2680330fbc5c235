"""Which GPU is a process's own."""

from __future__ import annotations

import torch


def take_gpu(number: int) -> None:
    """Make that GPU the current one, unless a script has chosen one, or there are not as many: each process has its own."""
    if torch.cuda.is_available() and torch.cuda.current_device() == 0 < number < torch.cuda.device_count():
        torch.cuda.set_device(number)
