"""Weights straight to the device: not before its memory is free, in order, and with an end for everybody."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.tiers.weight_store import WeightStore
from infinity.units.unit import Unit
from swapper import StagingArena, Swapper, SwapperConfig, TransferError
from swapper.backends.gds import GdsBackend
from swapper.volumes.volume import Volume
from tests.fake_device_files import FakeDriver
from tests.separate_host import SeparateHostDevice
from tests.unit.stage import frozen_unit
from tests.waiting import wait_until


class _Device(SeparateHostDevice):
    """Its kernels have passed a mark when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_marks = 0
        self.num_passed = 1 << 30

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def is_done(self, fence: Any) -> bool:
        return fence is None or fence <= self.num_passed


class _Bench:
    def __init__(self, directory: Path) -> None:
        self.driver = FakeDriver()
        backend = GdsBackend(Volume([directory], 1 << 20), self.driver, 2)
        self.swapper = Swapper(backend, SwapperConfig(deadline_seconds=20.0))
        self.arena = StagingArena(4096, 1)
        self.device = _Device()
        self.store = WeightStore(self.swapper, self.device, self.arena)
        self.units = [frozen_unit(index, size) for index, size in enumerate((5, 1, 3))]
        self.bytes = []
        for unit in self.units:
            self.store.allocate(unit)
            generator = torch.Generator().manual_seed(unit.index)
            self.bytes.append(torch.randint(256, (unit.num_bytes,), dtype=torch.uint8, generator=generator))
            self.store.write_all(unit, self.bytes[-1]).wait()
            unit.adopt(self.device.allocate_flat(unit.num_bytes))
            unit.flat.tensor().zero_()
        self.driver.calls.clear()

    def require_there(self, unit: Unit) -> None:
        assert unit.flat is not None and torch.equal(unit.flat.tensor(), self.bytes[unit.index])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    opened = _Bench(tmp_path)
    yield opened
    opened.device.num_passed = 1 << 30
    opened.store.close()
    opened.swapper.close()
    opened.arena.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "infinity-direct-read"]


def test_units_arrive_through_the_driver_and_no_page(bench: _Bench) -> None:
    for is_demand in (False, True):
        arrivals = [bench.store.fetch(unit, is_demand=is_demand) for unit in bench.units]
        arrivals[1].promote()
        for arrival, unit in zip(arrivals, bench.units, strict=True):
            arrival.wait()
            assert arrival.done()
            bench.require_there(unit)
            assert unit.flat is not None
            unit.flat.tensor().zero_()
    assert {name for name, *_ in bench.driver.calls} == {"read"}
    assert bench.arena.statistics().num_leases == 0


def test_nothing_is_read_before_earlier_kernels_have_let_go_of_the_memory(bench: _Bench) -> None:
    bench.device.num_passed = 1
    first, second = (bench.store.fetch(unit, is_demand=False) for unit in bench.units[:2])
    first.wait()
    second.promote()
    time.sleep(0.05)
    assert not second.done() and bench.units[1].flat is not None and not bench.units[1].flat.tensor().any()
    bench.device.num_passed = 2
    second.wait()
    bench.require_there(bench.units[1])


def test_a_read_sees_the_write_that_was_started_before_it(bench: _Bench) -> None:
    unit = bench.units[0]
    bench.bytes[0] = bench.bytes[0] ^ 255
    bench.store.write_all(unit, bench.bytes[0])
    bench.store.fetch(unit, is_demand=True).wait()
    bench.require_there(unit)


def test_a_buffer_has_no_views_once_it_has_arrived(bench: _Bench) -> None:
    unit = bench.units[0]
    arrival = bench.store.fetch(unit, is_demand=True)
    arrival.wait()
    assert unit.flat is not None
    flat = unit.flat
    wait_until(lambda: not flat.has_views)


def test_an_error_of_the_drive_reaches_who_waits(bench: _Bench) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "no")

    bench.driver.before = fail
    arrival = bench.store.fetch(bench.units[0], is_demand=True)
    with pytest.raises(TransferError, match="EIO"):
        arrival.wait()
    bench.driver.before = lambda: None
    bench.store.fetch(bench.units[0], is_demand=True).wait()
    bench.require_there(bench.units[0])


def test_an_error_of_the_device_reaches_who_waits(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(fence: Any) -> bool:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(bench.device, "is_done", die)
    arrival = bench.store.fetch(bench.units[0], is_demand=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            arrival.wait()
    assert arrival.done()
    monkeypatch.undo()
    bench.store.fetch(bench.units[1], is_demand=True).wait()
    bench.require_there(bench.units[1])


def test_after_close_everybody_gets_an_error(bench: _Bench) -> None:
    last = bench.store.fetch(bench.units[2], is_demand=False)
    bench.store.close()
    bench.store.close()
    last.wait()
    bench.require_there(bench.units[2])
    late = bench.store.fetch(bench.units[0], is_demand=True)
    assert late.done()
    with pytest.raises(RuntimeError, match="closed"):
        late.wait()
