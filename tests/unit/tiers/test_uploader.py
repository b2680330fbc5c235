"""The way of weights to a device: through few staging buffers, in order, and with an end for everybody when something fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from infinity.device.compute import ComputeDevice, FlatBuffer
from infinity.tiers.weight_store import WeightStore
from infinity.units.unit import Unit
from swapper import StagingPool, Swapper, SwapperConfig, SwapperError
from swapper.backend import Direction
from swapper.backends.memory import MemoryBackend
from tests.faults import FaultInjectingBackend, FaultRule
from tests.lazy_device import LazyDevice
from tests.separate_host import SeparateHostDevice
from tests.unit.stage import frozen_unit
from tests.waiting import wait_until

_PAGE = 4096
_WAIT_SECONDS = 20


class _Bench:
    """Units with known bytes, and a store that brings them to a device."""

    def __init__(self, device: ComputeDevice, num_staging_buffers: int, sizes: tuple[int, ...] = (5, 1, 3)) -> None:
        self.backend = FaultInjectingBackend(MemoryBackend(1 << 20, 2))
        self.swapper = Swapper(self.backend, SwapperConfig(deadline_seconds=_WAIT_SECONDS))
        self.staging_pool = StagingPool(_PAGE, num_staging_buffers, deadline_seconds=_WAIT_SECONDS)
        self.device = device
        self.store = WeightStore(self.swapper, device, self.staging_pool)
        self.units = [frozen_unit(index, size) for index, size in enumerate(sizes)]
        self.bytes: list[torch.Tensor] = []
        for unit in self.units:
            self.store.allocate(unit)
            generator = torch.Generator().manual_seed(unit.index)
            self.bytes.append(torch.randint(256, (unit.num_bytes,), dtype=torch.uint8, generator=generator))
            self.store.write_all(unit, self.bytes[-1])
            unit.adopt(self.flat(unit))

    def flat(self, unit: Unit) -> FlatBuffer:
        flat = self.device.allocate_flat(unit.num_bytes)
        flat.tensor().zero_()
        return flat

    def require_there(self, unit: Unit) -> None:
        assert torch.equal(unit.flat.tensor(), self.bytes[unit.index])

    def fail_reads(self, staging_buffer: int | None = None) -> None:
        """All, or the one of the ``staging buffer``-th staging buffer of the first unit, counted from 1, once."""
        if staging_buffer is None:
            self.backend.add(FaultRule(direction=Direction.READ, errno=errno.EIO))
            return
        extent = self.units[0].extent
        offset = extent.start + (staging_buffer - 1) * _PAGE  # not the nth read: two threads read
        self.backend.add(FaultRule(direction=Direction.READ, offset=offset, times=1, errno=errno.EIO))

    def close(self) -> None:
        self.store.close()
        self.swapper.close()
        assert self.staging_pool.num_leased == 0, "every staging buffer has come back"
        self.staging_pool.close()


@pytest.fixture(params=[1, 2, 8], ids="{} staging buffers".format)
def bench(request: pytest.FixtureRequest) -> Iterator[_Bench]:
    opened = _Bench(SeparateHostDevice(), request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("staging_buffer", [1, 2, 5])
def test_a_read_that_fails_is_told_and_ends_nothing_else(bench: _Bench, staging_buffer: int) -> None:
    bench.fail_reads(staging_buffer)
    arrivals = [bench.store.fetch(unit, is_demand=unit.index == 0) for unit in bench.units]
    with pytest.raises(SwapperError, match="EIO"):
        arrivals[0].wait()
    with pytest.raises(SwapperError, match="EIO"):
        arrivals[0].wait()  # and again, whoever asks
    for unit, arrival in zip(bench.units[1:], arrivals[1:], strict=True):
        try:
            arrival.wait()
        except SwapperError as error:
            # The swapper tells an error that nobody has seen to whoever comes next.
            assert "weights of unit 0" in str(error)
        else:
            bench.require_there(unit)
    for unit in bench.units:
        bench.store.fetch(unit, is_demand=True).wait()
        bench.require_there(unit)


@pytest.mark.parametrize("num_staging_buffers", [1, 2, 8])
@pytest.mark.parametrize("fail_at", [0, 2, 4])
def test_a_copy_that_fails_fails_its_own_unit_only(num_staging_buffers: int, fail_at: int) -> None:
    """With more staging buffers of the unit to come: they must neither be read into it nor end the thread."""

    class Failing(SeparateHostDevice):
        countdown = fail_at

        def upload(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:
            self.countdown -= 1
            if self.countdown == -1:
                raise MemoryError("the copy failed")
            return super().upload(target, source, after)

    bench = _Bench(Failing(), num_staging_buffers)
    arrivals = [bench.store.fetch(unit, is_demand=False) for unit in bench.units]
    with pytest.raises(MemoryError, match="the copy failed"):
        arrivals[0].wait()
    for unit, arrival in zip(bench.units[1:], arrivals[1:], strict=True):
        arrival.wait()
        bench.require_there(unit)
    bench.close()


@pytest.mark.parametrize("num_staging_buffers", [1, 2, 8])
def test_a_device_that_fails_ends_all_and_no_buffer_stays_leased(num_staging_buffers: int) -> None:
    class Lost(SeparateHostDevice):
        is_lost = False

        def synchronize(self, fence: object) -> None:
            if self.is_lost:
                raise RuntimeError("the device is lost")
            super().synchronize(fence)

    device = Lost()
    bench = _Bench(device, num_staging_buffers)
    device.is_lost = True
    arrivals = [bench.store.fetch(unit, is_demand=False) for unit in bench.units]
    with pytest.raises(RuntimeError, match="the device is lost"):
        for _ in range(3):  # copies that are launched are no error of their units
            for unit, arrival in zip(bench.units, arrivals, strict=True):
                arrival.wait()
                arrivals[unit.index] = bench.store.fetch(unit, is_demand=True)
    wait_until(lambda: not bench.staging_pool.num_leased)
    with pytest.raises(RuntimeError, match="the device is lost"):
        bench.store.fetch(bench.units[0], is_demand=True).wait()
    bench.close()


@pytest.mark.parametrize("num_staging_buffers", [1, 2, 3])
def test_a_page_is_not_used_again_before_its_copy_has_run(num_staging_buffers: int) -> None:
    """The device copies as late as it may: a staging buffer that was given back too early would hold the next one's bytes."""
    bench = _Bench(LazyDevice(), num_staging_buffers)
    for _ in range(2):
        arrivals = [bench.store.fetch(unit, is_demand=False) for unit in bench.units]
        for unit, arrival in zip(bench.units, arrivals, strict=True):
            arrival.wait()
            bench.require_there(unit)
            unit.flat.tensor().zero_()
    bench.close()
