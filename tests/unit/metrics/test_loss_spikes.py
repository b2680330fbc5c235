"""Which losses stand out."""

from __future__ import annotations

import math
import random

from infinity.metrics.run_log import LossSpikes


def _noisy(num: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [5 * math.exp(-step / 40) + 2 + draw.gauss(0, 0.05) for step in range(num)]


def test_a_loss_that_falls_and_trembles_has_no_spike() -> None:
    for seed in range(20):
        spikes = LossSpikes()
        assert not [loss for loss in _noisy(300, seed) if spikes.add(loss)]


def test_a_loss_that_jumps_is_told_once() -> None:
    spikes = LossSpikes()
    losses = _noisy(100)
    told = [spikes.add(loss) for loss in [*losses, 9.0, 9.5, 8.8, losses[-1], 9.0]]
    assert [bool(words) for words in told] == [False] * 100 + [True, False, False, False, True]
    assert told[100].startswith("the loss is 9, and was 2.")


def test_a_loss_that_is_not_finite_is_told_and_forgotten() -> None:
    spikes = LossSpikes()
    assert spikes.add(math.nan) == "the loss is nan"
    assert spikes.add(math.inf) == "", "the one before was told"
    assert not any(spikes.add(loss) for loss in _noisy(50))
    assert spikes.add(-math.inf) == "the loss is -inf"


def test_nothing_stands_out_of_nothing() -> None:
    spikes = LossSpikes()
    assert not any(spikes.add(loss) for loss in (1.0, 100.0, 1.0, 50.0))
    still = LossSpikes()
    assert not any(still.add(2.0) for _ in range(50)) and not still.add(2.01) and still.add(2.2)
