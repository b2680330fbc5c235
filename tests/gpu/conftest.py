"""What every test on a GPU needs: algorithms that give the same bits twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.internals import CudaDevice

# cuBLAS reads it when it is initialised, which no test has done yet when tests are collected.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_LATE_CYCLES = 20_000_000


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Without it, sums over rows of an embedding depend on the order in which threads come."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With INFINITY_SLOW_COPIES each copy begins some ten milliseconds late: what does not wait for it reads old bytes."""
    if not os.environ.get("INFINITY_SLOW_COPIES"):
        return
    copy = CudaDevice._copy

    def slowly(self: CudaDevice, stream: torch.cuda.Stream, *args: Any) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_LATE_CYCLES)
        return copy(self, stream, *args)

    monkeypatch.setattr(CudaDevice, "_copy", slowly)
