"""The report of one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, from the end of the step before to its own end.

    Seconds are wall-clock seconds of the training thread, except ``optimizer_seconds``, which a background thread spends
    beside it. Bytes are those of the NVMe tier, as counted by its swapper. An update may still run when its step ends;
    then its bytes and seconds count in the next report.
    """

    step: int
    """Number of the step, counted from 1."""
    seconds: float
    compute_seconds: float
    """``seconds`` less all waiting."""
    read_wait_seconds: float
    update_wait_seconds: float
    """Waiting for an update: of the unit needed next, or because gradients found no room before an update used theirs up."""
    optimizer_seconds: float
    read_bytes: int
    write_bytes: int
    predicted_read_bytes: int
    predicted_write_bytes: int
    loss: float | None
    """Mean of the step's micro-batch losses; None when the engine did not see them (plain loop)."""
    grad_norm: float | None
    schedule: str = "ordinary"
    """"vertical" when all micro-batches went through each unit together, else "ordinary"."""
    schedule_reason: str = ""
    """Why the step of `Engine.train_batch` did not go vertically; empty if it did, and for the user's own loop."""
