"""The report of one step."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.errors import size

# A choice: no measurement says where a wait begins to matter.
_SMALL_WAIT = 0.1
"""A step that waits for less than this share of its time counts as one that does not wait."""
_WORDS = {"read": "reads", "write": "writes", "compute": "compute", "optimizer": "the optimizer", "other": "other code"}


def _share_of(name: str) -> property:
    return property(
        lambda self: getattr(self, name) / self.seconds if self.seconds > 0 else 0.0,
        doc=f"``{name}`` as a share of the step.",
    )


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, from the end of the step before to its own end.

    Seconds are wall-clock seconds of the training thread, except those of others that work beside it: ``optimizer_seconds``
    of a background thread, and the ``*_busy_seconds`` of drives and copies. Bytes are those of the NVMe tier, as counted by
    its swapper. An update may still run when its step ends; then its bytes and seconds count in the next report.
    """

    step: int
    """Number of the step, counted from 1."""
    seconds: float
    compute_seconds: float
    """``seconds`` less all waiting."""
    read_wait_seconds: float
    update_wait_seconds: float
    """Seconds of waiting for an update: of the unit needed next, or of one whose gradients occupy the memory for new
    ones."""
    optimizer_seconds: float
    read_bytes: int
    write_bytes: int
    predicted_read_bytes: int
    predicted_write_bytes: int
    loss: float | None
    """Mean of the step's micro-batch losses; None when the engine did not see them (plain loop)."""
    grad_norm: float | None
    compute_busy_seconds: float = 0.0
    """Seconds in forward, backward and step, without waiting and the engine's own paging. On a GPU: the GPU's time."""
    write_wait_seconds: float = 0.0
    """Seconds of waiting for writes; only `Engine.flush` and similar calls wait for them."""
    read_busy_seconds: float = 0.0
    """Seconds with at least one read in progress; several drives at once count once."""
    write_busy_seconds: float = 0.0
    """Seconds with at least one write in progress."""
    drive_busy_seconds: float = 0.0
    """Seconds with at least one read or write in progress."""
    predicted_seconds: float | None = None
    """Time of the step that the plan predicts; None if it cannot predict one yet."""
    copy_busy_seconds: float = 0.0
    """Seconds with at least one copy between host and device in progress; 0 if the model computes in host memory."""
    schedule: str = "ordinary"
    """"vertical" when all micro-batches went through each unit together, else "ordinary"."""
    schedule_reason: str = ""
    """Why `Engine.train_batch` did not use the vertical schedule; empty if it did, and for the user's own loop."""
    commit_seconds: float = 0.0
    """How long the training thread waited for the commit of the step before, in a durable run."""
    is_skipped: bool = False
    """Whether the step changed nothing, because its gradients were not finite."""
    forward_seconds: float = 0.0
    """The part of ``compute_busy_seconds`` in forward. Recomputation in backward counts as backward."""
    backward_seconds: float = 0.0
    """The part of ``compute_busy_seconds`` in backward."""
    update_seconds: float = 0.0
    """The part of ``compute_busy_seconds`` in ``optimizer.step()``. ``optimizer_seconds`` has the updates beside the
    model."""
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group, with which the step was made."""
    loss_scale: float = 1.0
    """Factor by which the losses of the step were multiplied; 1 unless the compute dtype is fp16."""
    num_samples: int | None = None
    """Samples of the step over all processes: the leading size of the batches that the engine saw, or else the config's
    batch size; None if both are unknown (plain loop)."""
    num_tokens: int | None = None
    """Elements of the batches' whole-number matrices (token ids, padding included); None if there are none."""
    host_bytes: int = 0
    """Host memory of this process at the end of the step (resident set)."""
    host_peak_bytes: int = 0
    """Largest ``host_bytes`` since the process began."""
    device_peak_bytes: int | None = None
    """The most that torch's allocator has held on the GPU so far; None if the model computes in host memory."""
    buffers_peak_bytes: int = 0
    """The most host memory that the engine's buffers took in the step: what ``host_memory_budget`` limits. Python, its libraries
    and activations come on top. Several engines of a process count together."""

    # Shares may add up to more than 1: drives, optimizer and model work side by side.
    compute_share = _share_of("compute_busy_seconds")
    drive_busy_share = _share_of("drive_busy_seconds")
    read_busy_share = _share_of("read_busy_seconds")
    write_busy_share = _share_of("write_busy_seconds")
    optimizer_share = _share_of("optimizer_seconds")
    copy_busy_share = _share_of("copy_busy_seconds")

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second; None if tokens are not known."""
        return self.num_tokens / self.seconds if self.num_tokens is not None and self.seconds > 0 else None

    @property
    def drive_bytes_per_second(self) -> float | None:
        """Bytes read and written per second while a drive was busy; None if none was."""
        moved = self.read_bytes + self.write_bytes
        return moved / self.drive_busy_seconds if self.drive_busy_seconds > 0 else None

    @property
    def wait_seconds(self) -> float:
        """All waiting of the training thread."""
        return self.seconds - self.compute_seconds

    @property
    def other_seconds(self) -> float:
        """Neither computing nor waiting: the loop's own code, such as a data loader, and the engine's paging."""
        # The two come from different clocks on a GPU, so the difference may be slightly negative.
        return max(0.0, self.compute_seconds - self.compute_busy_seconds)

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Busy seconds of each candidate for `bound_by`."""
        return {
            "compute": self.compute_busy_seconds,
            "other": self.other_seconds,
            "read": self.read_busy_seconds,
            "write": self.write_busy_seconds,
            "optimizer": self.optimizer_seconds,
        }

    @property
    def bound_by(self) -> str:
        """What a faster step needs more of: "read", "write", "compute", "optimizer", or "other".

        The one that was busy longest. If the training thread hardly waited, it is "compute", or "other" if the thread spent
        more time outside of forward and backward (a slow data loader, for example).
        """
        # Example: a step of 1.0 s that waits 0.4 s, with reads at a drive for 0.9 s and compute for 0.5 s: bound by
        # "read". If it waits 0.05 s, drives cannot be the cause, however busy they are: bound by "compute".
        hardly_waits = self.wait_seconds < _SMALL_WAIT * self.seconds
        busy = self.busy_seconds
        return max(("compute", "other") if hardly_waits else busy, key=lambda name: busy[name])

    def describe(self) -> str:
        """Describe the step in one line."""
        parts = [
            f"step {self.step}: {self.seconds:.{_digits(self.seconds)}f} s",
            f"compute {self.compute_share:.0%}",
            f"drive busy {self.drive_busy_share:.0%} (read {self.read_busy_share:.0%}, write {self.write_busy_share:.0%})",
            f"{size(self.read_bytes)} read, {size(self.write_bytes)} written",
            f"waited: {self._waits()}",
            f"bound by {_WORDS[self.bound_by]}",
        ]
        if self.is_skipped:
            parts.insert(1, "skipped: gradients were not finite")
        if self.copy_busy_seconds:
            parts.insert(3, f"copies {self.copy_busy_share:.0%}")
        return " | ".join(parts).replace("%", " %")

    __str__ = describe

    def _waits(self) -> str:
        waits = {
            "reads": self.read_wait_seconds,
            "optimizer": self.update_wait_seconds,
            "writes": self.write_wait_seconds,
            "commit": self.commit_seconds,
        }
        digits = _digits(self.seconds)
        told = [f"{name} {seconds:.{digits}f} s" for name, seconds in waits.items() if round(seconds, digits) > 0]
        return ", ".join(told) or "nothing"


def _digits(seconds: float) -> int:
    """Return how many decimals show two figures of a step's time."""
    return 1 if seconds >= 1 else 2 if seconds >= 0.1 else 3
