"""Backends around backends say what is inside."""

from __future__ import annotations

from swapper import ALIGNMENT
from swapper.backends.memory import MemoryBackend
from swapper.wrappers.base import BackendWrapper
from tests.faults import FaultInjectingBackend


def test_wrappers_show_what_is_inside() -> None:
    inner = MemoryBackend(16 * ALIGNMENT, 3)
    backend = BackendWrapper(FaultInjectingBackend(inner))
    for name in ("capacity_bytes", "block_bytes", "boundary_bytes", "concurrency", "is_direct", "num_bounced"):
        assert getattr(backend, name) == getattr(inner, name)
    assert backend.locate(5) == inner.locate(5)
    assert backend.describe() == f"BackendWrapper(FaultInjectingBackend({inner.describe()}))"
    assert backend.close(60.0)
