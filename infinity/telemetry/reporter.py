"""Makes a report of each step, and says what the config wants said."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable

import torch

from infinity.errors import NonFiniteLossWarning
from infinity.telemetry.clock import StepClock
from infinity.telemetry.report import StepReport

logger = logging.getLogger(__name__)


class Reporter:
    """Collects losses, seconds and bytes between two steps. Must not know where they come from."""

    def __init__(
        self,
        clock: StepClock,
        *,
        read_counters: Callable[[], tuple[int, int]],
        read_busy_seconds: Callable[[], float],
        read_prediction: Callable[[], tuple[int, int]],
        steps_per_print: int | None,
        prints_breakdown: bool,
    ) -> None:
        """
        Args:
            clock: the training thread's waiting.
            read_counters: bytes read and written so far in the NVMe tier.
            read_busy_seconds: seconds that the optimizer's thread has worked so far.
            read_prediction: predicted bytes read and written per step.
            steps_per_print: a line every so many steps; None for none.
            prints_breakdown: log each report.
        """
        self._clock = clock
        self._read_counters = read_counters
        self._read_busy_seconds = read_busy_seconds
        self._read_prediction = read_prediction
        self._steps_per_print = steps_per_print
        self._prints_breakdown = prints_breakdown
        self._losses: list[torch.Tensor] = []
        self._has_begun = False
        self._counted = (0, 0)
        self._busy_seconds = 0.0
        self._schedule = ("ordinary", "")

    def begin(self) -> None:
        """Something happens in the present step; the first time, counting begins."""
        if not self._has_begun:
            self._has_begun = True
            self._clock.reset()
            self._counted = self._read_counters()

    def note_loss(self, loss: torch.Tensor, step: int) -> None:
        """A micro-batch's loss. On a GPU it is looked at when the step ends, so that nothing waits for it."""
        detached = loss.detach()
        self._losses.append(detached)
        if detached.device.type == "cpu":
            _warn_if_not_finite(float(detached), step)

    def note_schedule(self, schedule: str, reason: str) -> None:
        """In which order the present step goes, and why not vertically."""
        self._schedule = (schedule, reason)

    def forget_losses(self) -> None:
        """The micro-batches so far do not count."""
        self._losses.clear()

    def end_step(self, step: int, grad_norm: float | None) -> StepReport:
        """The report of the step that ends now, which is the ``step``-th."""
        waited = dict(self._clock.waited_seconds)
        seconds = self._clock.reset()
        counted, busy_seconds = self._read_counters(), self._read_busy_seconds()
        predicted = self._read_prediction()
        losses = [float(loss) for loss in self._losses]
        if any(loss.device.type != "cpu" for loss in self._losses):
            for value in losses:
                _warn_if_not_finite(value, step - 1)
        self._losses.clear()
        report = StepReport(
            step=step,
            seconds=seconds,
            compute_seconds=seconds - sum(waited.values()),
            read_wait_seconds=waited["read"],
            update_wait_seconds=waited["update"] + waited["gradients"],
            optimizer_seconds=busy_seconds - self._busy_seconds,
            read_bytes=counted[0] - self._counted[0],
            write_bytes=counted[1] - self._counted[1],
            predicted_read_bytes=predicted[0],
            predicted_write_bytes=predicted[1],
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=grad_norm,
            schedule=self._schedule[0],
            schedule_reason=self._schedule[1],
        )
        self._schedule = ("ordinary", "")
        self._counted, self._busy_seconds = counted, busy_seconds
        if self._steps_per_print and step % self._steps_per_print == 0:
            logger.info("step %d: loss %s, %.2f s, gradient norm %s", step, report.loss, seconds, grad_norm)
        if self._prints_breakdown:
            logger.info("step %d: %s", step, report)
        return report


def _warn_if_not_finite(value: float, step: int) -> None:
    if not math.isfinite(value):
        logger.error("the loss of step %d is %s", step, value)
        warnings.warn(NonFiniteLossWarning(step=step, loss=value), stacklevel=4)
