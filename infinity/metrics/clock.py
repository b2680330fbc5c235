"""Measures the training thread's time: computing by phase, and waiting by cause.

[Note: stamps]
Computing is measured between two points of the compute stream. On the CPU such a point is the present second. A GPU
runs behind the host, so a point is an event, whose time is known after the GPU has passed it. The clock keeps pairs of
stamps, and counts them as soon as their seconds are known (`collect_events`).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from infinity.device.compute import ComputeDevice
from infinity.metrics.timeline import Row, Timeline

# Cause -> what `Engine.waiting_for` says while the thread waits.
_CAUSES = {
    "read": "reads from NVMe",
    "update": "the optimizer",
    "gradients": "room for gradients",
    "write": "writes to NVMe",
    "commit": "a commit of the durable run",
    "ranks": "the other ranks",
}
_PHASES = ("forward", "backward", "step")


class Awaited(Protocol):
    """Whatever the training thread can wait for: a future, a handle, an update job."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None: ...


class StepClock:
    """Seconds since the last `reset`, of computing by phase and of waiting by the causes in `_CAUSES`.

    Attributes:
        waited_seconds: Seconds that the training thread waited, by cause.
        compute_seconds: Seconds in forward, backward and step without waiting and without the engine's own paging.
        phase_seconds: The same, for each of "forward", "backward" and "step".
        waiting_for: What it waits for right now, in words; empty while it does not.
    """

    def __init__(self, device: ComputeDevice | None = None, timeline: Timeline | None = None) -> None:
        """``device``: marks points of its compute stream. ``timeline``: where spans are recorded, if anywhere."""
        self.waiting_for = ""
        self.began_seconds = time.perf_counter()
        self.reset()
        self._timeline = timeline
        self._device = device or ComputeDevice()
        self._phase = ""
        self._unit = ""
        self._since: Any = None
        """The stamp at which the present computing began; None while nothing is counted."""
        # Limited by the GPU's delay: `pause_compute` collects each time, from the oldest on.
        self._open: deque[tuple[str, str, Any, Any]] = deque()
        """Computing whose seconds are not known yet: phase, unit, first and last stamp."""

    # ------------------------------------------------------------------------------------------------------ computing

    def begin_compute(self, phase: str) -> None:
        """Begin to count computing of ``phase`` ("forward", "backward" or "step"), unless it is counted already."""
        if self._phase != phase:
            self.end_compute()
            self._phase = phase
            self.resume_compute()

    def end_compute(self) -> None:
        """Stop counting, and leave the phase."""
        self.pause_compute()
        self._phase = self._unit = ""

    def pause_compute(self) -> None:
        """Stop counting within a phase, while the engine pages or waits."""
        if self._since is not None:
            self._open.append((self._phase, self._unit, self._since, self._device.stamp()))
            self._since = None
            self.collect_events()

    def resume_compute(self, unit: str | None = None) -> None:
        """Count again, for ``unit`` (None: the same as before). Outside of a phase nothing is counted."""
        if self._phase and self._since is None:
            self._unit = self._unit if unit is None else unit
            self._since = self._device.stamp()

    def collect_events(self) -> None:
        """Count the computing that the device has finished."""
        while self._open:
            phase, unit, first, last = self._open[0]
            begin, end = self._device.seconds_at(first), self._device.seconds_at(last)
            if begin is None or end is None:
                # Points pass in order: if the oldest is not known, no later one is.
                return
            self._open.popleft()
            self.compute_seconds += end - begin
            self.phase_seconds[phase] += end - begin
            if self._timeline is not None:
                self._timeline.add(Row.COMPUTE, f"{phase} {unit}" if unit else phase, begin, end)

    # -------------------------------------------------------------------------------------------------------- waiting

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time of the ``with`` block as waiting for ``cause``, a key of `_CAUSES`."""
        begin = time.perf_counter()
        # Waits happen inside of forward, in a hook. Computing stops for as long, and goes on with the same unit.
        was_computing = self._since is not None
        self.pause_compute()
        self.waiting_for = _CAUSES[cause]
        try:
            yield
        finally:
            end = time.perf_counter()
            self.waited_seconds[cause] += end - begin
            self.waiting_for = ""
            if self._timeline is not None:
                self._timeline.add(Row.WAITING, _CAUSES[cause], begin, end)
            if was_computing:
                self.resume_compute()

    def wait_for(self, awaited: Awaited, cause: str) -> None:
        """Wait, and count the seconds if it is not done already."""
        # A wait that returns at once would pause computing for nothing, which costs two events on a GPU.
        with contextlib.nullcontext() if awaited.done() else self.waiting(cause):
            awaited.wait()

    def reset(self) -> float:
        """Begin a new step. Returns the seconds since the last reset."""
        now = time.perf_counter()
        elapsed = now - self.began_seconds
        self.began_seconds = now
        self.waited_seconds: dict[str, float] = dict.fromkeys(_CAUSES, 0.0)
        self.compute_seconds = 0.0
        self.phase_seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        return elapsed
