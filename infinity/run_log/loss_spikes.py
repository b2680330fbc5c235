"""Which losses stand out of those before them.

Knows numbers only.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_REMEMBERED = 64
_ENOUGH = 10
"""Losses before anything can stand out of them."""
_WIDTHS = 8.0
"""So many times the usual deviation is a spike."""
_NORMAL = 1.4826
"""A normal distribution's standard deviation in units of its median absolute deviation."""
_LEAST_DEVIATION = 0.005
"""As a share of the loss: where losses hardly vary, a change in the third digit is none."""


class LossSpikes:
    """Knows the last losses. Their median and median absolute deviation say what is usual: a few outliers change neither."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._is_in_spike = False

    def note(self, loss: float) -> str:
        """What stands out with this loss, in words; empty if nothing does, or if the one before stood out as well."""
        was_in_spike, self._is_in_spike = self._is_in_spike, False
        words = self._words(loss)
        self._is_in_spike = bool(words)
        if math.isfinite(loss):
            self._losses.append(loss)
        return "" if was_in_spike else words

    def _words(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) < _ENOUGH:
            return ""
        usual = statistics.median(self._losses)
        deviation = _NORMAL * statistics.median(abs(each - usual) for each in self._losses)
        if loss <= usual + _WIDTHS * max(deviation, _LEAST_DEVIATION * abs(usual)):
            return ""
        return f"the loss is {loss:.4g}, and was {usual:.4g} before"
