"""Makes a `StepReport` of each step, and logs what the config asks for."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.device.compute import Copy
from infinity.errors import ConfigError, NonFiniteLossWarning
from infinity.metrics.clock import StepClock
from infinity.metrics.report import StepReport
from infinity.metrics.timeline import KEY, Row, Timeline, check_writable

logger = logging.getLogger(__name__)

_GIVEN = (
    *("predicted_read_bytes", "predicted_write_bytes", "predicted_seconds"),
    *("host_bytes", "host_peak_bytes", "device_peak_bytes", "buffers_peak_bytes"),
)
"""Entries of a report in the order of a prediction, and of what ``memory`` gives."""


@dataclass(frozen=True)
class DriveCounters:
    """A snapshot of all drives together, under the names of `StepReport`. Time in which several are busy counts once."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_busy_seconds: float = 0.0
    write_busy_seconds: float = 0.0
    drive_busy_seconds: float = 0.0

    def since(self, before: DriveCounters) -> DriveCounters:
        """Return the difference from an earlier snapshot."""
        # Counters only grow, so a step is the difference of two snapshots.
        return DriveCounters(**{name: now - getattr(before, name) for name, now in vars(self).items()})


class Reporter:
    """Collects losses, seconds and bytes between two steps."""

    def __init__(
        self,
        clock: StepClock,
        counters: Callable[[], DriveCounters],
        optimizer_seconds: Callable[[], float],
        copies: Callable[[], Sequence[tuple[Copy, float, float]]],
        memory: Callable[[], tuple[int, int, int | None, int]],
        timeline: Timeline | None = None,
        *,
        num_processes: int = 1,
        steps_per_print: int | None = None,
        prints_breakdown: bool = False,
    ) -> None:
        """
        Args:
            clock: the training thread's time.
            counters: what the drives have done so far.
            optimizer_seconds: seconds that the optimizer's thread has worked so far.
            copies: bytes, begin and end of the copies between host and device since the last call, and what they were.
            memory: bytes of host memory now, the most so far, the most of the device's (None: it is the host's), and the
                most of the engine's buffers since the last call.
            timeline: where steps are recorded, if anybody wants one.
            num_processes: that train together.
            steps_per_print: a line every so many steps; None for none.
            prints_breakdown: a line for each step that says where its time went.
        """
        self._clock = clock
        self._counters, self._optimizer_seconds_of = counters, optimizer_seconds
        self._copies, self._memory = copies, memory
        self._num_processes = num_processes
        self._timeline = timeline
        self._steps_per_print = steps_per_print
        self._prints_breakdown = prints_breakdown
        # Of the micro-batches of this step: detached, so that no graph is kept.
        self._losses: list[torch.Tensor] = []
        self._sizes: list[tuple[int, int | None]] = []
        self._has_begun = False
        self._counted = DriveCounters()
        self._optimizer_seconds = 0.0
        # End of the latest copy that was counted, see `_collect_events`.
        self._copies_end = 0.0
        self._copy_seconds = 0.0
        self._schedule = ("ordinary", "")

    def begin(self) -> None:
        """Begin to count, at the first call. Later calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._collect_events()
            # Drops what happened before the first forward: building the engine is no part of step 1.
            self._clock.reset()
            self._copy_seconds = 0.0
            self._counted = self._counters()
            # Resets the peak of the engine's buffers.
            self._memory()

    def begin_anew(self) -> None:
        """Let the next `begin` count again: what happened since the last step is no part of one."""
        self._has_begun = False

    def on_loss(self, loss: torch.Tensor, step: int) -> None:
        """Record the loss of a micro-batch. On a GPU it is read when the step ends, so that nothing waits for it."""
        detached = loss.detach()
        self._losses.append(detached)
        if detached.device.type == "cpu":
            # float() of a CUDA tensor would synchronize with the GPU in the middle of a step.
            _warn_if_not_finite(float(detached), step)

    def on_micro_batch(self, num_samples: int, num_tokens: int | None) -> None:
        """Record the size of a micro-batch."""
        self._sizes.append((num_samples, num_tokens))

    def on_schedule(self, schedule: str, reason: str) -> None:
        """Record the schedule of the present step, and why it is not vertical."""
        self._schedule = (schedule, reason)

    def forget_losses(self) -> None:
        """Drop the micro-batches so far: they do not count."""
        self._losses.clear()
        self._sizes.clear()

    def end_step(
        self,
        step: int,
        grad_norm: float | None,
        *,
        prediction: tuple[int, int, float | None],
        lr: tuple[float, ...] = (),
        loss_scale: float = 1.0,
        num_samples: int | None = None,
        is_skipped: bool = False,
    ) -> StepReport:
        """Return the report of the step that ends now, which has the number ``step``.

        ``prediction``: bytes read and written per step, and seconds, if they are known.
        ``num_samples``: of all processes, if the engine saw no batch; None if that is not known.
        """
        self._collect_events()
        # All figures are read before `reset`, which clears them.
        phases = dict(self._clock.phase_seconds)
        seen_samples, num_tokens = self._sizes_of_step()
        given: dict[str, Any] = dict(zip(_GIVEN, (*prediction, *self._memory()), strict=True))
        began, waited = self._clock.began_seconds, dict(self._clock.waited_seconds)
        compute_busy_seconds, copy_busy_seconds = self._clock.compute_seconds, self._copy_seconds
        self._copy_seconds = 0.0
        seconds = self._clock.reset()
        counted, optimizer_seconds = self._counters(), self._optimizer_seconds_of()
        moved = counted.since(self._counted)
        # On a GPU, float() waits for the kernels of the loss.
        losses = [float(loss) for loss in self._losses]
        if any(loss.device.type != "cpu" for loss in self._losses):
            # Those on the CPU were looked at in `on_loss`.
            for value in losses:
                _warn_if_not_finite(value, step - 1)
        self._losses.clear()
        self._sizes.clear()
        report = StepReport(
            step=step,
            seconds=seconds,
            compute_seconds=seconds - sum(waited.values()),
            read_wait_seconds=waited["read"],
            update_wait_seconds=waited["update"] + waited["gradients"],
            optimizer_seconds=optimizer_seconds - self._optimizer_seconds,
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=grad_norm,
            compute_busy_seconds=compute_busy_seconds,
            write_wait_seconds=waited["write"],
            copy_busy_seconds=copy_busy_seconds,
            schedule=self._schedule[0],
            schedule_reason=self._schedule[1],
            commit_seconds=waited["commit"],  # of a durable run
            is_skipped=is_skipped,
            forward_seconds=phases["forward"],
            backward_seconds=phases["backward"],
            update_seconds=phases["step"],
            lr=lr,
            loss_scale=loss_scale,
            num_samples=num_samples if seen_samples is None else seen_samples,
            num_tokens=num_tokens,
            **vars(moved),
            **given,
        )
        # Only `train_batch` sets it; the user's own loop is always ordinary.
        self._schedule = ("ordinary", "")
        self._counted, self._optimizer_seconds = counted, optimizer_seconds
        if self._timeline is not None:
            self._timeline.add_step(began, began + seconds, report)
        if self._steps_per_print and step % self._steps_per_print == 0:
            logger.info("step %d: loss %s, %.2f s, gradient norm %s", step, report.loss, seconds, grad_norm)
        if self._prints_breakdown:
            logger.info("%s", report.describe())
        return report

    def _sizes_of_step(self) -> tuple[int | None, int | None]:
        """Return samples and tokens of all processes, which have the same number each."""
        # A vertical step that is begun anew in the ordinary order has seen its batches twice.
        sizes = self._sizes[-len(self._losses) :] if self._losses else self._sizes
        if not sizes:
            return None, None
        tokens = [each for _, each in sizes if each is not None]
        num = self._num_processes
        return num * sum(samples for samples, _ in sizes), num * sum(tokens) if tokens else None

    def save_timeline(self, path: Path) -> None:
        """Write the spans recorded so far.

        Raises:
            ConfigError: nothing is recorded, or the file cannot be written.
        """
        if self._timeline is None:
            # Spans are only kept if the config names a file: see `Timeline` for what they take.
            problem = "no timeline is recorded"
            raise ConfigError.value(KEY, None, problem, cure="Set it to the path of a file before the engine is made")
        self._collect_events()
        check_writable(path)
        self._timeline.save(path)

    def _collect_events(self) -> None:
        """Count the computing and copies that the device has finished."""
        self._clock.collect_events()
        for copy, begin, end in self._copies():
            # Example: an upload from 0 to 3 s and a download from 1 to 4 s count 3 s, then max(0, 4 - max(1, 3)) = 1 s:
            # 4 s busy. Uploads and downloads run side by side: time that is covered already does not count again.
            self._copy_seconds += max(0.0, end - max(begin, self._copies_end))
            self._copies_end = max(self._copies_end, end)
            if self._timeline is not None:
                self._timeline.add(Row.COPIES, copy.name, begin, end, num_bytes=copy.num_bytes)


def _warn_if_not_finite(value: float, step: int) -> None:
    if not math.isfinite(value):
        logger.error("the loss of step %d is %s", step, value)
        warnings.warn(NonFiniteLossWarning(step=step, loss=value), stacklevel=4)
