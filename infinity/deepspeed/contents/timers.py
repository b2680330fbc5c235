"""``engine.timers``: stop watches for scripts, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from infinity.deepspeed.contents.messages import logger


class Timer:
    """Adds up times between `start` and `stop`. It does not wait for a GPU's kernels."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_at: float | None = None
        self._laps: list[float] = []

    def start(self) -> None:
        """Begin a lap.

        Raises:
            RuntimeError: one has begun.
        """
        if self._started_at is not None:
            raise RuntimeError(f"timer '{self._name}' runs already: stop it first")
        self._started_at = time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the lap. ``reset`` and ``record`` are taken as DeepSpeed takes them, without effect.

        Raises:
            RuntimeError: none has begun.
        """
        if self._started_at is None:
            raise RuntimeError(f"timer '{self._name}' does not run: start it first")
        self._laps.append(time.perf_counter() - self._started_at)
        self._started_at = None

    def reset(self) -> None:
        """Forget all laps."""
        self._started_at = None
        self._laps.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all laps, the running one included. ``reset``: then forget them."""
        is_running = self._started_at is not None
        if is_running:
            self.stop()
        total = 1000.0 * sum(self._laps)
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of one lap; 0 without any."""
        return 1000.0 * sum(self._laps) / max(len(self._laps), 1)


class Timers:
    """``timers("name")`` returns the timer of that name, and makes it at its first use."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All of them."""
        return self._timers

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, **_: Any) -> None:
        """Log the milliseconds of the existing timers among ``names``, divided by ``normalizer``."""
        found = [name for name in names if name in self._timers]
        parts = [f"{name}: {self._timers[name].elapsed(reset) / normalizer:.2f}" for name in found]
        logger.info("time (ms) | %s", " | ".join(parts))


class ThroughputTimer:
    """``engine.tput_timer``: accepts the script's calls. Its speed comes from the engine's own report."""

    def __init__(self, speed: Callable[[], float | None]) -> None:
        """``speed``: samples per second of the last step; None if there is none."""
        self._speed = speed
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """An epoch has ended."""
        self.epoch_count += 1

    def start(self) -> None:
        """Taken without effect: the engine measures each step."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Taken without effect, too."""

    def avg_samples_per_sec(self) -> float:
        """Of the last step, over all processes; minus infinity before there is one, as in DeepSpeed."""
        speed = self._speed()
        return float("-inf") if speed is None else speed
