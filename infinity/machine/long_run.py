"""Measures a drive over minutes: where its write cache ends, how hot it gets, and the rate that it holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infinity.machine.hardware import HOT_CELSIUS
from swapper.measure.measurement import DriveTest, IOSetting, Sample, Workload

# Long against the bursts of a drive, short against the minutes of a run. `_LEAST_SAMPLES` keeps the medians below
# meaningful in a short run.
_SAMPLE_SECONDS = 5.0
_LEAST_SAMPLES = 12
_FALL = 0.1
"""A rate that ends so much below the first ones has fallen; less is noise."""
_IN_MEDIAN = 3
"""Number of samples in a row whose median is compared: a single one may be slow for any reason."""


@dataclass(frozen=True)
class Moment:
    """One sample of a long run.

    Attributes:
        seconds: Since its begin, at the sample's end.
        written_bytes: Since its begin.
        bytes_per_second: Of the sample, both directions.
        celsius: Of the hottest drive; None if none tells.
    """

    seconds: float
    written_bytes: int
    bytes_per_second: float
    celsius: float | None


@dataclass
class LongRun:
    """Samples of a drive under the mix of reads and writes of an optimizer step."""

    moments: list[Moment] = field(default_factory=list)

    @property
    def _rates(self) -> list[float]:
        return [each.bytes_per_second for each in self.moments]

    @property
    def first_rate(self) -> float:
        """Bytes per second at the beginning."""
        # The cache of the drive still takes all writes.
        return statistics.median(self._rates[:_IN_MEDIAN])

    @property
    def rate(self) -> float:
        """Bytes per second that it holds: the median of the last quarter."""
        return statistics.median(self._rates[-max(_IN_MEDIAN, len(self.moments) // 4) :])

    @property
    def fell_at(self) -> Moment | None:
        """The last sample before the rate falls; None if it does not fall."""
        if self.rate > (1 - _FALL) * self.first_rate:
            return None
        # The first place whose median of three is below the middle of both rates. Example: rates 3, 3, 3, 3, 1, 1, 1,
        # ... have the middle 2. At n = 3 the samples 3, 1, 1 have the median 1: moment 3 is the last fast one.
        middle, rates = (self.first_rate + self.rate) / 2, self._rates
        slow = (n for n in range(len(rates)) if statistics.median(rates[n : n + _IN_MEDIAN]) < middle)
        return self.moments[next(slow)]

    def words(self) -> str:
        """Describe the result, and what to do."""
        end = self.moments[-1]
        heat = [each.celsius for each in self.moments if each.celsius is not None]
        warmth = f" It went from {heat[0]:.0f} to {max(heat):.0f} °C." if heat else ""
        fall = self.fell_at
        if fall is None:
            spread = 50 * (max(self._rates) - min(self._rates)) / self.rate
            return (
                f"It holds {self.rate / 1e9:.2f} GB/s (±{spread:.0f} %) over {end.seconds / 60:.1f} minutes and "
                f"{end.written_bytes / 1e9:.1f} GB written.{warmth}"
            )
        text = (
            f"It slows down from {self.first_rate / 1e9:.2f} to {self.rate / 1e9:.2f} GB/s after "
            f"{fall.written_bytes / 1e9:.1f} GB written ({fall.seconds / 60:.1f} minutes)"
        )
        # Heat explains a fall as well as the end of a cache does, and can be cured.
        if heat and max(heat) >= HOT_CELSIUS:
            return f"{text}, hot.{warmth} Cool it (heat sink, air flow) and measure again. Plans take the lower rate."
        return (
            f"{text}: its cache ends there.{warmth} Plans take the lower rate. More free space keeps such a cache large; "
            "drives for servers have none; a second drive doubles the rate."
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        fall = self.fell_at
        return {
            "first_bytes_per_second": self.first_rate,
            "bytes_per_second": self.rate,
            "fell_after_bytes": None if fall is None else fall.written_bytes,
            "moments": [vars(each) for each in self.moments],
        }


def hold(
    test: DriveTest,
    setting: IOSetting,
    seconds: float,
    celsius: Callable[[], float | None],
    progress: Callable[[str, float], None],
    keep: Callable[[Sample], None],
) -> LongRun:
    """Measure for minutes which rate a drive holds under the reads and writes of an optimizer step.

    Args:
        test: the drive.
        setting: how requests are made.
        seconds: how long; at least twelve samples are taken.
        celsius: returns the temperature now; None if it is not known.
        progress: called with a text and the finished fraction.
        keep: called with each sample.

    Raises:
        SwapperError: the drive failed.
    """
    found = LongRun()
    length = min(_SAMPLE_SECONDS, seconds / _LEAST_SAMPLES)
    began, written = time.monotonic(), 0
    while len(found.moments) < _LEAST_SAMPLES or time.monotonic() - began < seconds:
        sample = test.measure(setting, Workload.MIXED, length)
        keep(sample)
        written += sample.write_bytes
        passed = time.monotonic() - began
        found.moments.append(Moment(passed, written, sample.bytes_per_second, celsius()))
        told = f"{written / 1e9:.0f} GB written, {sample.bytes_per_second / 1e9:.2f} GB/s"
        progress(told, min(1.0, passed / seconds))
    return found
