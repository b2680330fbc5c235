"""What CUDA's libraries keep of a GPU's memory from their first use on, which is no part of what an engine takes."""

from __future__ import annotations

import gc

import torch
from torch import nn


def load_libraries(width: int) -> None:
    """Have cuBLAS take its workspaces: one for this thread's forward, one for backward's."""
    layer = nn.Linear(width, width, bias=False, device="cuda")
    layer(torch.randn(4, width, device="cuda", requires_grad=True)).sum().backward()
    del layer
    gc.collect()
    torch.cuda.synchronize()
