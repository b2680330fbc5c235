"""Kernels in CUDA C, compiled when they are wanted by NVIDIA's runtime compiler, which comes with torch.

`torch.cuda._compile_kernel` has been there since torch 2.9 (run with 2.11, read in 2.13). Where it is missing or
fails, there is no kernel, and torch's own operations run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

Launch = Callable[[int, Sequence[Any]], None]
"""`(blocks, arguments)`: runs a kernel on the current stream. Arguments are tensors and integers of 32 bits."""


def compiled_for(device: torch.device, source: str, name: str, threads: int) -> Launch | None:
    """The kernel for this GPU, with so many threads per block; None if it cannot be had."""
    try:
        with torch.cuda.device(device):
            kernel: Any = torch.cuda._compile_kernel(source, name)  # type: ignore[no-untyped-call,unused-ignore]
    except Exception as error:
        logger.info("the GPU kernel '%s' cannot be compiled, torch's own operations run: %s", name, error)
        return None

    def launch(blocks: int, arguments: Sequence[Any]) -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(arguments))

    return launch
