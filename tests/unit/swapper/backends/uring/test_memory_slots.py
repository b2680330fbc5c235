"""Memory that a ring knows: taken whole or not at all, kept mapped, given back, and refused in words."""

from __future__ import annotations

import errno
import gc
import logging
import weakref
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT, AlignedRegion, StagingPool, Swapper, Volume
from swapper.backends.memory import MemoryBackend
from swapper.backends.uring import ring_loop
from swapper.backends.uring.backend import UringBackend
from swapper.backends.uring.ring import library
from swapper.backends.uring.ring_loop import MemorySlots
from swapper.wrappers.base import BackendWrapper
from tests.conformance.suite import aligned_bytes, random_bytes, read, write
from tests.uring import fixed_transfers, needs_uring

_SECONDS = 20.0
pytestmark = needs_uring


def test_registered_memory_takes_the_fixed_path_and_the_bytes_are_right(
    backend: UringBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = fixed_transfers(monkeypatch)
    region = AlignedRegion(16 * ALIGNMENT)
    inside, outside = region.array(), aligned_bytes(16 * ALIGNMENT)
    unregister = backend.register_memory(region)
    inside[:] = random_bytes(inside.size, 1)
    write(backend, 0, inside[ALIGNMENT : 5 * ALIGNMENT])
    assert len(fixed) == 1
    read(backend, 0, outside[: 4 * ALIGNMENT])
    assert len(fixed) == 1
    assert np.array_equal(outside[: 4 * ALIGNMENT], inside[ALIGNMENT : 5 * ALIGNMENT])
    write(backend, 32 * ALIGNMENT, outside[: 4 * ALIGNMENT])
    inside[:] = 0
    read(backend, 32 * ALIGNMENT, inside[12 * ALIGNMENT :])
    assert len(fixed) == 2
    assert np.array_equal(outside[: 4 * ALIGNMENT], inside[12 * ALIGNMENT :])
    assert not inside[: 12 * ALIGNMENT].any()
    unregister()
    unregister()
    write(backend, 0, inside)
    assert len(fixed) == 2


def test_registered_memory_stays_mapped_until_it_is_given_back(backend: UringBackend) -> None:
    region = AlignedRegion(4 * ALIGNMENT)
    mapping = weakref.ref(region._bytes.base)
    array = region.array()
    unregister = backend.register_memory(region)
    region.release()
    array[:] = 7
    write(backend, 0, array)
    del array
    gc.collect()
    assert mapping() is not None, "another mapping at this address would be read from other pages"
    unregister()
    assert mapping() is None


def test_registered_memory_is_let_go_when_the_backend_is_closed(tmp_path: Path) -> None:
    backend = UringBackend(Volume([tmp_path], 1 << 20))
    region = AlignedRegion(ALIGNMENT)
    mapping = weakref.ref(region._bytes.base)
    unregister = backend.register_memory(region)
    region.release()
    assert backend.close(_SECONDS) and mapping() is None
    unregister()
    assert backend.register_memory(AlignedRegion(ALIGNMENT)) is not None, "too late, but no reason to raise"


def test_without_enough_lockable_memory_transfers_work_unregistered_and_one_line_says_so(
    backend: UringBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library(), "update_buffers", lambda *_: -errno.ENOMEM)
    fixed = fixed_transfers(monkeypatch)
    region = AlignedRegion(8 * ALIGNMENT)
    for _ in range(3):
        backend.register_memory(region)()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{8 * ALIGNMENT} bytes of memory are not registered" in record.message
    assert "ENOMEM" in record.message and "ulimit -l" in record.message
    data = region.array()
    data[:] = random_bytes(data.size, 2)
    copy = aligned_bytes(data.size)
    write(backend, 0, data)
    read(backend, 0, copy)
    assert not fixed and np.array_equal(data, copy)


class _FakeRing:
    """Remembers what was registered; fails where it is told to."""

    def __init__(self, failing_slots: int = 0) -> None:
        self.slots: dict[int, tuple[int, int]] = {}
        self.num_fills = 0
        self._num_good = failing_slots

    def make_slots(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def fill_slot(self, slot: int, address: int, num_bytes: int) -> None:
        if num_bytes == 0:
            del self.slots[slot]
            return
        self.num_fills += 1
        if self.num_fills == self._num_good:
            raise OSError(errno.ENOMEM, "no more")
        self.slots[slot] = (address, num_bytes)


def test_long_memory_is_registered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_loop, "_MAX_SLOT_BYTES", 4 * ALIGNMENT)
    ring = _FakeRing()
    slots = MemorySlots(ring)  # type: ignore[arg-type]
    region = AlignedRegion(10 * ALIGNMENT)
    address = region.address
    taken = slots.add(region)
    assert [ring.slots[slot] for slot in taken] == [
        (address, 4 * ALIGNMENT),
        (address + 4 * ALIGNMENT, 4 * ALIGNMENT),
        (address + 8 * ALIGNMENT, 2 * ALIGNMENT),
    ]
    assert slots.find(address, 4 * ALIGNMENT) == taken[0]
    assert slots.find(address + 7 * ALIGNMENT, ALIGNMENT) == taken[1]
    assert slots.find(address + 9 * ALIGNMENT, ALIGNMENT) == taken[2]
    assert slots.find(address + 3 * ALIGNMENT, 2 * ALIGNMENT) == -1, "across two pieces"
    assert slots.find(address + 9 * ALIGNMENT, 2 * ALIGNMENT) == -1, "over the end"
    assert slots.find(address - 1, 1) == -1
    slots.remove(taken)
    assert ring.slots == {} and slots.find(address, 1) == -1


def test_memory_is_registered_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_loop, "_MAX_SLOT_BYTES", ALIGNMENT)
    ring = _FakeRing(failing_slots=3)
    slots = MemorySlots(ring)  # type: ignore[arg-type]
    region = AlignedRegion(4 * ALIGNMENT)
    with pytest.raises(OSError, match="no more"):
        slots.add(region)
    assert ring.slots == {} and slots.find(region.address, 1) == -1
    assert len(slots.add(region)) == 4
    with pytest.raises(OSError, match="all 256 places"):
        slots.add(AlignedRegion(300 * ALIGNMENT))
    assert len(ring.slots) == 4


def test_an_arena_is_registered_through_the_swapper_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = fixed_transfers(monkeypatch)
    backend = UringBackend(Volume([tmp_path], 1 << 20))
    with Swapper(BackendWrapper(backend)) as swapper, StagingPool(ALIGNMENT, 4) as staging_pool:
        staging_pool.register_with(swapper.register_memory)
        extent = swapper.allocate(ALIGNMENT, "x")
        with staging_pool.lease() as page:
            page.tensor.fill_(9)
            swapper.write(extent, page.tensor).wait()
            swapper.read(extent, page.tensor).wait()
            assert (page.tensor == 9).all()
        assert len(fixed) == 2
        mapping = weakref.ref(staging_pool._region._bytes.base)
        del page
        staging_pool.close()
        gc.collect()
        assert mapping() is None
    with Swapper(MemoryBackend(ALIGNMENT)) as swapper:
        swapper.register_memory(AlignedRegion(ALIGNMENT))()  # others do not care
