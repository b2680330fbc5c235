"""What every test on a GPU needs: algorithms that give the same bits twice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# cuBLAS reads it when it is initialised, which no test has done yet when tests are collected.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Without it, sums over rows of an embedding depend on the order in which threads come."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
