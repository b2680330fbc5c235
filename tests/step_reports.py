"""Reports of steps, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from infinity import StepReport

_STEP: dict[str, Any] = {
    "seconds": 1.0,
    "compute_seconds": 0.5,
    "read_wait_seconds": 0.5,
    "update_wait_seconds": 0.0,
    "optimizer_seconds": 0.0,
    "read_bytes": 0,
    "write_bytes": 0,
    "predicted_read_bytes": 0,
    "predicted_write_bytes": 0,
    "loss": 1.5,
    "grad_norm": None,
}


def report(step: int, **changes: Any) -> StepReport:
    """A step of one second, unless ``changes`` say otherwise."""
    return StepReport(step=step, **_STEP | changes)
