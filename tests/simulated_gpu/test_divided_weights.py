"""Units come to a GPU from pages in which their ranks' shares are put together: none is used again before its copy has run."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from swapper import StagingPool, Swapper
from tests.internals import DividedWeights, Shards
from tests.simulated_gpu import backend
from tests.simulated_gpu.device import SimulatedGpu
from tests.unit.stage import trainable_unit

try:
    backend.register()
except backend.NoSimulation as missing:
    pytest.skip(str(missing), allow_module_level=True)

_NUM_RANKS, _NUM_UNITS, _NUM_ROUNDS = 3, 5, 4


def _value(unit: int, number: int) -> float:
    """Of all weights of a unit, in a round."""
    return 1.0 + unit + 100 * number


class _Pull:
    def __init__(self, targets: Sequence[torch.Tensor], value: float, delay_seconds: float) -> None:
        self._targets = targets
        self._value = value
        self._delay_seconds = delay_seconds

    def promote(self) -> None: ...

    def wait(self) -> None:
        time.sleep(self._delay_seconds)
        for target in self._targets:
            target.view(torch.float32).fill_(self._value)


class _Pulls:
    """Brings what the others have, as `Pulls` does."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.number = 0

    def register(self, giver: Any) -> int:
        return 0

    def unregister(self, number: int) -> None: ...

    def release(self, number: int, index: int) -> None: ...

    def pull(
        self, what: str, number: int, index: int, targets: Mapping[int, Sequence[torch.Tensor]], *, is_demand: bool
    ) -> _Pull:
        pieces = [piece for of_rank in targets.values() for piece in of_rank]
        return _Pull(pieces, _value(index, self.number), self._draw.choice([0, 0.002]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_staging_buffers", [1, 2])
def test_each_unit_has_the_shares_of_all(num_staging_buffers: int, seed: int) -> None:
    device, pulls = SimulatedGpu(seed), _Pulls(seed)
    units = [trainable_unit(index, [(40 + 8 * index, 100)]) for index in range(_NUM_UNITS)]
    staging_pool = StagingPool(-(-max(unit.num_bytes for unit in units) // 4096) * 4096, num_staging_buffers)
    swapper = Swapper.in_memory(1 << 20)
    store = DividedWeights(None, swapper, device, Shards(1, _NUM_RANKS), cast(Any, pulls), staging_pool)
    for unit in units:
        store.allocate(unit, in_host_memory=True)
        unit.adopt(device.allocate_flat(unit.num_bytes))
    for number in range(_NUM_ROUNDS):
        pulls.number = number
        for unit in units:
            ours = torch.full((unit.num_bytes // 4,), _value(unit.index, number))
            store.write_all(unit, ours.view(torch.uint8)).wait()
        arrivals = [store.fetch(unit, is_demand=unit.index == 3) for unit in units]
        for unit, arrival in zip(units, arrivals, strict=True):
            arrival.promote()
            arrival.wait()
            assert unit.flat is not None
            doubled = unit.trainable_view(unit.flat.tensor()) * 2  # a kernel that reads the weights at once
            assert not unit.flat.has_views
            found = torch.empty(doubled.shape, device="cpu")
            device.synchronize(device.download(found, doubled, device.mark()))
            assert bool((found == 2 * _value(unit.index, number)).all())
    store.close()
    assert staging_pool.statistics().num_leased == 0
    staging_pool.close()
    swapper.close()
    device.end()
    assert not device.order.races
