"""Units are gathered on a GPU from shards in host memory: none of it is used again before its copy has run."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from swapper import StagingPool, Swapper
from tests.internals import DividedWeights, Shards, world
from tests.simulated_gpu import backend
from tests.simulated_gpu.device import SimulatedGpu
from tests.unit.stage import trainable_unit

backend.register_or_skip()

_NUM_RANKS, _NUM_UNITS, _NUM_ROUNDS, _BLOCK = 3, 5, 4, 512


def _value(unit: int, number: int) -> float:
    """Of all weights of a unit, in a round."""
    return 1.0 + unit + 100 * number


class _Ranks:
    """Gives what the others have, in memory that is used again as soon as a call has returned."""

    index, num, number = 1, _NUM_RANKS, 1

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.value = 0.0
        """Of the others' weights."""

    all_gather_in_memory = type(world()).all_gather_in_memory  # by `all_gather_parts` below

    def issue(self) -> tuple[int, int]:
        return 0, 0

    def all_gather_ints(self, what: str, values: Sequence[int], issued: Any) -> list[list[int]]:
        return [list(values)] * self.num

    def all_gather_parts(
        self,
        what: str,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, torch.Tensor], None],
        write: Callable[[int, torch.Tensor], None],
        **_: Any,
    ) -> None:
        first, last = parts[self.index]
        sent = torch.empty(last - first, dtype=torch.int32, device="cpu")
        read(first, sent)
        assert bool((sent.view(torch.float32) == self.value).all())
        for rank, (start, stop) in enumerate(parts):
            for offset in range(start, stop if rank != self.index else start, _BLOCK):
                block = torch.full((min(_BLOCK, stop - offset),), self.value, device="cpu")
                time.sleep(self._draw.choice([0, 0.001]))
                write(offset, block.view(torch.int32))
                block.fill_(float("nan"))


class _Gathers:
    """A `CollectiveThread` without process groups."""

    def __init__(self, device: SimulatedGpu, ranks: _Ranks, value_of: Callable[[int], float]) -> None:
        self.main = ranks
        self._device = device
        self._value_of = value_of
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.put = self._queue.put

    def _run(self) -> None:
        with self._device.background_thread():
            while (gather := self._queue.get()) is not None:
                self.main.value = self._value_of(gather.unit.index)
                gather.run(self.main)
                gather.finish(None)

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_staging_buffers", [1, 2])
def test_each_unit_has_the_shards_of_all(num_staging_buffers: int, seed: int) -> None:
    device, number = SimulatedGpu(seed), 0
    gathers = _Gathers(device, _Ranks(seed), lambda index: _value(index, number))
    units = [trainable_unit(index, [(40 + 8 * index, 100)]) for index in range(_NUM_UNITS)]
    staging_pool = StagingPool(-(-max(unit.num_bytes for unit in units) // 4096) * 4096, num_staging_buffers)
    swapper = Swapper.in_memory(1 << 20)
    store = DividedWeights(None, swapper, device, Shards(1, _NUM_RANKS), cast(Any, gathers), staging_pool)
    for unit in units:
        store.allocate(unit, in_host_memory=True)
        unit.adopt(device.allocate_flat(unit.num_bytes))
    for number in range(_NUM_ROUNDS):  # which `gathers` looks at
        for unit in units:
            ours = torch.full((unit.num_bytes // 4,), _value(unit.index, number))
            store.write_all(unit, ours.view(torch.uint8))
        arrivals = [store.fetch(unit, is_demand=unit.index == 3) for unit in units]
        for unit, arrival in zip(units, arrivals, strict=True):
            arrival.promote()
            arrival.wait()
            doubled = unit.trainable_view(unit.flat.tensor()) * 2  # a kernel that reads the weights at once
            assert not unit.flat.has_views
            found = torch.empty(doubled.shape, device="cpu")
            device.synchronize(device.download(found, doubled, device.mark()))
            assert bool((found == 2 * _value(unit.index, number)).all())
    store.close()
    assert staging_pool.num_leased == 0
    staging_pool.close()
    swapper.close()
    device.end()
    assert not device.order.races
