"""A far or slow drive."""

from __future__ import annotations

from swapper.backend import Direction, IOBackend
from tests.faults import FaultInjectingBackend, FaultRule


def delayed(inner: IOBackend, read_seconds: float = 0.0, write_seconds: float = 0.0) -> FaultInjectingBackend:
    """A backend whose requests reach the inner one so much later."""
    reads = FaultRule(direction=Direction.READ, delay_seconds=read_seconds)
    return FaultInjectingBackend(inner, [reads, FaultRule(direction=Direction.WRITE, delay_seconds=write_seconds)])
