"""The way to device memory, with a driver that stands in for cuFile and takes host memory for a device's."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from swapper import (
    ALIGNMENT,
    BackendUnavailableError,
    InvalidBufferError,
    Swapper,
    SwapperConfig,
    TransferError,
)
from swapper.backends import gds
from swapper.backends.gds import GdsBackend, find_driver
from swapper.backends.threads import ThreadsBackend
from swapper.measure.choice import open_backend
from swapper.memory.device_bytes import DeviceBytes
from swapper.testing import run_conformance
from swapper.volumes.volume import Volume
from tests.fake_device_files import FakeDriver


def _bytes(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def _swapper(directory: Path, driver: FakeDriver, **settings: Any) -> Swapper:
    config = SwapperConfig(**{"request_bytes": 4 * ALIGNMENT, "deadline_seconds": 20.0, **settings})
    return Swapper(GdsBackend(Volume([directory], 64 * ALIGNMENT), driver, 2), config)


def test_device_memory_goes_through_the_driver_and_host_memory_past_it(tmp_path: Path, driver: FakeDriver) -> None:
    with _swapper(tmp_path, driver) as swapper:
        assert swapper.accepts_device_memory
        driver.calls.clear()
        extent = swapper.allocate(10 * ALIGNMENT, "x")
        data, copy = _bytes(10 * ALIGNMENT, 1), torch.zeros(10 * ALIGNMENT, dtype=torch.uint8)
        swapper.write(extent, DeviceBytes(data)).wait()
        assert sorted(driver.calls) == [
            ("write", block * ALIGNMENT, num_blocks * ALIGNMENT) for block, num_blocks in ((0, 4), (4, 4), (8, 2))
        ]
        driver.calls.clear()
        swapper.read(extent, copy).wait()
        assert torch.equal(data, copy) and driver.calls == []
        swapper.write(extent, _bytes(10 * ALIGNMENT, 2)).wait()
        swapper.read(extent, DeviceBytes(copy)).wait()
        assert torch.equal(copy, _bytes(10 * ALIGNMENT, 2)) and len(driver.calls) == 3
        assert any("swapper-gds-read" in name for name in driver.threads)
    assert driver.handles == {}


def test_any_offset_length_and_memory(tmp_path: Path, driver: FakeDriver) -> None:
    with _swapper(tmp_path, driver) as swapper:
        extent = swapper.allocate(8 * ALIGNMENT, "x")
        model = _bytes(8 * ALIGNMENT, 0)
        swapper.write(extent, model.clone())
        for seed, (low, high) in enumerate([(0, 1), (4095, 4097), (100, 30_000), (4096, 8192), (32_767, 32_768)]):
            source = _bytes(high - low + 7, seed)[7:]
            swapper.write(extent, DeviceBytes(source), offset=low)
            model[low:high] = source
            whole, part = torch.zeros(8 * ALIGNMENT, dtype=torch.uint8), torch.zeros(high - low, dtype=torch.uint8)
            swapper.read(extent, DeviceBytes(whole)).wait()
            swapper.read(extent, DeviceBytes(part), offset=low).wait()
            assert torch.equal(whole, model) and torch.equal(part, source)
        half = torch.zeros(20_000, dtype=torch.uint8)
        swapper.read(extent, DeviceBytes(half), num_bytes=10_000).wait()
        assert torch.equal(half[:10_000], model[:10_000]) and not half[10_000:].any()


def test_any_dtype_and_shape() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    memory = DeviceBytes(tensor)
    assert len(memory) == memory.size == 48 and memory.address == tensor.data_ptr()
    assert memory[4:12].address == tensor.data_ptr() + 4 and len(memory[4:12]) == 8
    assert len(DeviceBytes(torch.empty(0, 3))) == 0
    with pytest.raises(InvalidBufferError, match="not contiguous"):
        DeviceBytes(tensor.T)


def test_the_tensor_lives_until_the_transfer_is_over(tmp_path: Path, driver: FakeDriver) -> None:
    with _swapper(tmp_path, driver) as swapper:
        extent = swapper.allocate(ALIGNMENT, "x")
        gate = threading.Event()
        driver.before = lambda: gate.wait(20) and None
        handle = swapper.write(extent, DeviceBytes(_bytes(ALIGNMENT, 3)))
        junk = [torch.zeros(ALIGNMENT, dtype=torch.uint8) for _ in range(50)]
        gate.set()
        handle.wait()
        copy = torch.zeros(ALIGNMENT, dtype=torch.uint8)
        swapper.read(extent, DeviceBytes(copy)).wait()
        assert torch.equal(copy, _bytes(ALIGNMENT, 3)) and len(junk) == 50


def test_conformance_of_the_way_through_host_memory(tmp_path: Path) -> None:
    assert run_conformance(lambda capacity: GdsBackend(Volume([tmp_path], capacity), FakeDriver())) >= 10


def test_files_of_a_striped_volume(tmp_path: Path, driver: FakeDriver) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    volume = Volume([tmp_path / "a", tmp_path / "b"], 64 * ALIGNMENT, stripe_bytes=2 * ALIGNMENT)
    with Swapper(GdsBackend(volume, driver)) as swapper:
        assert len(driver.handles) == 2
        extent = swapper.allocate(20 * ALIGNMENT, "x")
        data, copy = _bytes(20 * ALIGNMENT, 1), torch.zeros(20 * ALIGNMENT, dtype=torch.uint8)
        swapper.write(extent, DeviceBytes(data))
        swapper.read(extent, copy).wait()
        assert torch.equal(data, copy)
    assert driver.handles == {}


# ------------------------------------------------------------------------------------------------------- what fails


def test_errors_of_the_driver_are_transfer_errors(tmp_path: Path, driver: FakeDriver) -> None:
    with _swapper(tmp_path, driver) as swapper:
        extent = swapper.allocate(ALIGNMENT, "x")
        memory = DeviceBytes(_bytes(ALIGNMENT, 1))

        for error, words in (
            (RuntimeError("cuFileWrite failed: 5030"), "cuFileWrite failed: 5030"),
            (OSError(errno.EIO, "no"), "EIO"),
        ):
            driver.before = mock.Mock(side_effect=error)
            with pytest.raises(TransferError, match=words):
                swapper.write(extent, memory).wait()


def test_short_transfers_are_completed(tmp_path: Path, driver: FakeDriver) -> None:
    with _swapper(tmp_path, driver) as swapper:
        extent = swapper.allocate(8 * ALIGNMENT, "x")
        driver.most_bytes = ALIGNMENT + 100
        data, copy = _bytes(8 * ALIGNMENT, 1), torch.zeros(8 * ALIGNMENT, dtype=torch.uint8)
        swapper.write(extent, DeviceBytes(data)).wait()
        swapper.read(extent, DeviceBytes(copy)).wait()
        assert torch.equal(data, copy) and swapper.statistics().num_retries > 0


def test_close_does_not_wait_for_ever(tmp_path: Path, driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    has_hung, gate = threading.Event(), threading.Event()
    swapper = _swapper(tmp_path, driver, deadline_seconds=0.4)
    extent = swapper.allocate(ALIGNMENT, "x")

    def hang() -> None:
        has_hung.set()
        gate.wait(150)

    driver.before = hang
    swapper.write(extent, DeviceBytes(_bytes(ALIGNMENT, 1)))
    assert has_hung.wait(60.0)  # or close would find a request that has not begun
    swapper.close()  # which returns: nothing opens the gate before
    assert "a transfer hangs" in caplog.text
    assert driver.handles, "what a hung transfer uses is left alone"
    gate.set()
    backend: Any = swapper.backend
    assert backend.close(20.0) and driver.handles == {}


def test_other_swappers_refuse_device_memory(tmp_path: Path) -> None:
    memory = DeviceBytes(_bytes(ALIGNMENT, 1))
    for config in (SwapperConfig(backend="threads"), SwapperConfig(backend="threads", verify_checksums=True)):
        with Swapper.open(tmp_path, 1 << 20, config) as swapper:
            assert not swapper.accepts_device_memory
            with pytest.raises(InvalidBufferError, match="DeviceBytes has no memory to transfer"):
                swapper.write(swapper.allocate(ALIGNMENT, "x"), memory)


# ------------------------------------------------------------------------------------------------- where it is not to be had


def _refused(volume: Volume) -> BackendUnavailableError:
    with pytest.raises(BackendUnavailableError) as caught:
        open_backend(volume, SwapperConfig(backend="gds"))
    assert caught.value.backend == "gds" and 'set backend to "auto"' in str(caught.value)
    # The volume is still the caller's, and untouched.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swapper-")]
    backend = ThreadsBackend(volume)
    assert backend.close(5.0)
    return caught.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said(tmp_path: Path) -> None:
    assert _refused(Volume([tmp_path], ALIGNMENT)).reason == "torch sees no CUDA device"
    with pytest.raises(BackendUnavailableError, match="torch sees no CUDA device"):
        Swapper.open(tmp_path, 1 << 20, SwapperConfig(backend="gds"))
    assert os.listdir(tmp_path) == []


def test_without_cufile_all_reasons_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.delattr(torch._C, "_gds_register_handle", raising=False)
    error = _refused(Volume([tmp_path], ALIGNMENT))
    assert "kvikio" in error.reason and "this torch was built without cuFile" in error.reason


@pytest.mark.parametrize("mode", [True, types.SimpleNamespace(name="ON")])
def test_kvikio_that_goes_around_cufile_is_not_used(mode: object, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = types.SimpleNamespace(
        **({"get": lambda key: mode} if mode is not True else {"compat_mode": lambda: mode})
    )
    modules = sys.modules
    monkeypatch.setitem(modules, "kvikio", types.SimpleNamespace(defaults=defaults))
    monkeypatch.setitem(modules, "kvikio.defaults", defaults)
    with pytest.raises(RuntimeError, match="compatibility mode"):
        gds.KvikioDriver()


class _Opened:
    """As kvikio's: opens by name, and takes what has a CUDA array interface."""

    def __init__(self, path: str, flags: str) -> None:
        self.fd = os.open(path, os.O_RDWR)
        assert flags == "r+"

    def pread(self, buffer: Any, size: int, file_offset: int) -> Any:
        interface = buffer.__cuda_array_interface__
        assert interface["shape"] == (size,) and interface["typestr"] == "|u1"
        data = os.pread(self.fd, size, file_offset)
        ctypes.memmove(interface["data"][0], data, len(data))
        return types.SimpleNamespace(get=lambda: len(data))

    def pwrite(self, buffer: Any, size: int, file_offset: int) -> Any:
        view = (ctypes.c_char * size).from_address(buffer.__cuda_array_interface__["data"][0])
        num_bytes = os.pwrite(self.fd, bytes(view), file_offset)
        return types.SimpleNamespace(get=lambda: num_bytes)

    def close(self) -> None:
        os.close(self.fd)


def test_kvikio_is_called_as_it_wants_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch file has no name: what kvikio opens must be the same file."""
    defaults = types.SimpleNamespace(get=lambda key: types.SimpleNamespace(name="AUTO"))
    modules = sys.modules
    monkeypatch.setitem(modules, "kvikio", types.SimpleNamespace(defaults=defaults, CuFile=_Opened))
    monkeypatch.setitem(modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    driver = find_driver()
    assert isinstance(driver, gds.KvikioDriver)
    monkeypatch.setattr(driver, "allocate", FakeDriver().allocate)
    with Swapper(GdsBackend(Volume([tmp_path], 64 * ALIGNMENT, direct=False), driver)) as swapper:
        extent = swapper.allocate(100_000, "x")
        data, copy = _bytes(100_000, 1), torch.zeros(100_000, dtype=torch.uint8)
        swapper.write(extent, DeviceBytes(data)).wait()
        swapper.read(extent, copy).wait()
        assert torch.equal(data, copy)
        copy.zero_()
        swapper.read(extent, DeviceBytes(copy)).wait()
        assert torch.equal(data, copy)


class _RefusingDriver(FakeDriver):
    def register(self, fd: int) -> object:
        if self.handles:
            raise RuntimeError("cuFileHandleRegister failed: 5027")
        return super().register(fd)


class _LyingDriver(FakeDriver):
    def read(self, handle: object, target: DeviceBytes, offset: int) -> int:
        return len(target)


@pytest.mark.parametrize(
    ("driver", "words"), [(_RefusingDriver(), "5027"), (_LyingDriver(), "a trial read of 4096 bytes gave other bytes")]
)
def test_a_file_that_the_driver_cannot_use_is_named(
    driver: FakeDriver, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gds, "find_driver", lambda: driver)
    error = _refused(Volume([tmp_path / "a", tmp_path / "b"], 16 * ALIGNMENT, stripe_bytes=ALIGNMENT))
    assert words in error.reason and str(tmp_path) in error.reason and "through fake" in error.reason
    assert driver.handles == {}


def test_it_is_marked_experimental(tmp_path: Path, driver: FakeDriver) -> None:
    backend = GdsBackend(Volume([tmp_path], ALIGNMENT), driver)
    assert gds.__doc__ is not None and "Experimental" in gds.__doc__ and "experimental" in backend.describe()
    assert backend.close(5.0)
