"""Medians, and how far they can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Where the median of what was sampled lies, with the given probability (`level`, 0 to 1)."""

    low: float
    high: float
    level: float


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The shortest interval between two of the sorted values that holds the true median with at least `level`.

    It is the one of the sign test: each independent value is above the true median with probability 1/2, whatever the
    distribution. With fewer than six values even smallest to largest stays below 95 %; the level that is reached is said.
    """
    ordered = sorted(values)
    num_values = len(ordered)
    cut, reached = 0, _coverage(num_values, 0)
    while _coverage(num_values, cut + 1) >= level:
        cut += 1
        reached = _coverage(num_values, cut)
    return Interval(ordered[cut], ordered[-1 - cut], reached)


def _coverage(num_values: int, cut: int) -> float:
    """Probability that the median lies inside when `cut` values are left out at each end."""
    outside = sum(math.comb(num_values, below) for below in range(cut + 1)) / float(2**num_values)
    return max(0.0, 1.0 - 2.0 * outside)


def spread_percent(values: Sequence[float]) -> float:
    """Half of smallest to largest, in percent of the median: what stands behind a ±."""
    middle = statistics.median(values)
    return 100 * (max(values) - min(values)) / 2 / middle if middle else 0.0
