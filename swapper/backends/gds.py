"""Straight between drives and the memory of a GPU, through NVIDIA's cuFile. Experimental.

It has been tested with a driver that stands in for cuFile, and not on a GPU. Bytes in host memory go through worker threads as
they always do; only requests on :class:`swapper.memory.device_bytes.DeviceBytes` go through cuFile.

[Note: streams]
cuFile knows nothing of CUDA streams. Whoever starts a read waits until no kernel uses the target any more, and starts
kernels that use it after the read is over; the same, the other way round, goes for writes.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swapper.backend import Direction, IORequest
from swapper.backends.threads import ThreadsBackend
from swapper.backends.volume_backend import STOP_SECONDS
from swapper.backends.workers import WorkerPool
from swapper.config import ALIGNMENT
from swapper.errors import BackendUnavailableError
from swapper.memory.device_bytes import DeviceBytes
from swapper.memory.region import AlignedRegion
from swapper.uncopyable import closed_unless_made
from swapper.volumes.volume import Volume

logger = logging.getLogger(__name__)

_CURE = 'set backend to "auto", which goes through host memory'


class DeviceFileDriver(Protocol):
    """Moves bytes between files and the memory of a device; blocks until they have moved."""

    name: str

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return device memory, for a trial: uint8, 1-D."""

    def register(self, fd: int) -> Any:
        """Make an open file known; return its handle. Whatever it raises means that this file cannot be used."""

    def deregister(self, handle: Any) -> None:
        """Undo :meth:`register`."""

    def read(self, handle: Any, target: DeviceBytes, offset: int) -> int:
        """Fill device memory from an offset of the file on; return how many bytes came."""

    def write(self, handle: Any, source: DeviceBytes, offset: int) -> int:
        """Write device memory to an offset of the file; return how many bytes went."""


@dataclass(frozen=True)
class _Lender:
    """Lends a part of device memory under the CUDA array interface."""

    __cuda_array_interface__: dict[str, Any]

    @classmethod
    def of(cls, memory: DeviceBytes) -> _Lender:
        return cls({"shape": (len(memory),), "typestr": "|u1", "data": (memory.address, False), "version": 3})


class TorchDriver:
    """cuFile through torch's own binding, which does not say how many bytes moved: none fail, or all did.

    As of torch 2.13 it also holds the interpreter lock during a transfer, hence kvikio is preferred.
    """

    name = "torch"

    def __init__(self) -> None:
        self._calls: Any = torch._C
        if not hasattr(self._calls, "_gds_register_handle"):
            raise RuntimeError("this torch was built without cuFile")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device="cuda")

    def register(self, fd: int) -> Any:
        return self._calls._gds_register_handle(fd)

    def deregister(self, handle: Any) -> None:
        self._calls._gds_deregister_handle(handle)

    def read(self, handle: Any, target: DeviceBytes, offset: int) -> int:
        self._calls._gds_load_storage(handle, _storage_of(target), offset)
        return len(target)

    def write(self, handle: Any, source: DeviceBytes, offset: int) -> int:
        self._calls._gds_save_storage(handle, _storage_of(source), offset)
        return len(source)


def _storage_of(memory: DeviceBytes) -> torch.UntypedStorage:
    # A storage of its own, because the binding always transfers the whole storage.
    return torch.as_tensor(_Lender.of(memory), device=memory.device).untyped_storage()


class KvikioDriver:
    """cuFile through kvikio, without its way around cuFile."""

    name = "kvikio"

    def __init__(self) -> None:
        self._kvikio: Any = importlib.import_module("kvikio")
        defaults: Any = importlib.import_module("kvikio.defaults")
        mode: Any = defaults.get("compat_mode") if hasattr(defaults, "get") else defaults.compat_mode()
        if mode is True or getattr(mode, "name", "") == "ON":
            raise RuntimeError("kvikio is in its compatibility mode: it finds no libcufile, or cannot read /run/udev")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device="cuda")

    def register(self, fd: int) -> Any:
        # It opens files by name, which a scratch file does not have; this one leads to the same file.
        return self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")

    def deregister(self, handle: Any) -> None:
        handle.close()

    def read(self, handle: Any, target: DeviceBytes, offset: int) -> int:
        return int(handle.pread(_Lender.of(target), len(target), offset).get())

    def write(self, handle: Any, source: DeviceBytes, offset: int) -> int:
        return int(handle.pwrite(_Lender.of(source), len(source), offset).get())


_DRIVERS: tuple[Callable[[], DeviceFileDriver], ...] = (KvikioDriver, TorchDriver)


def find_driver() -> DeviceFileDriver:
    """Return the first driver that can be loaded here.

    Raises:
        BackendUnavailableError: There is no GPU, or no way to cuFile.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailableError("gds", "torch sees no CUDA device", _CURE)
    reasons: list[str] = []
    for driver in _DRIVERS:
        try:
            return driver()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise BackendUnavailableError(
        "gds",
        f"neither kvikio nor torch leads to cuFile ({'; '.join(reasons)})",
        f"pip install kvikio-cu12, or {_CURE}",
    )


class GdsBackend(ThreadsBackend):
    """Knows a volume, worker threads for host memory, and a driver for device memory; must not know extents.

    Args:
        volume: Where the bytes go; closed together with the backend.
        driver: The way to device memory; see :func:`find_driver`.
        num_threads: Worker threads for each direction, of either kind.

    Raises:
        BackendUnavailableError: The driver cannot use one of the files. The volume is still the caller's.
    """

    accepts_device_memory = True

    def __init__(self, volume: Volume, driver: DeviceFileDriver, num_threads: int = 4) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._handles: dict[int, Any] = {}
        self._device_pool: WorkerPool | None = None
        super().__init__(volume, num_threads)  # which may call `stop`
        with closed_unless_made(self.stop, STOP_SECONDS):
            try:
                for file in volume.files:
                    self._handles[file.fd] = driver.register(file.fd)
                    self._try(file.fd, file.num_bytes)
            except Exception as error:
                reason = f"cuFile (through {driver.name}) cannot use {file.name}: {type(error).__name__}: {error}"
                raise BackendUnavailableError("gds", reason, f"take a local ext4 or xfs on NVMe, or {_CURE}") from error
            self._device_pool = WorkerPool("gds", self._transfer_device_bytes, num_threads)

    def _try(self, fd: int, num_bytes: int) -> None:
        """Compare what the driver reads with what is in the file."""
        num_bytes = min(ALIGNMENT, num_bytes)
        if not num_bytes:
            return
        expected = AlignedRegion(ALIGNMENT).array()[:num_bytes]
        os.preadv(fd, [expected.data], 0)
        target = self._driver.allocate(num_bytes)
        num_read = self._driver.read(self._handles[fd], DeviceBytes(target), 0)
        if num_read != num_bytes or not torch.equal(target.cpu(), torch.from_numpy(expected)):
            raise RuntimeError(f"a trial read of {num_bytes} bytes gave other bytes")

    def describe(self) -> str:
        """Return one line for logs."""
        return f"gds (experimental) through {self._driver.name} for device memory; host memory by {super().describe()}"

    def submit(self, request: IORequest) -> None:
        """Hand the request to a thread that waits for the driver, or for the kernel."""
        memory: object = request.memory
        if isinstance(memory, DeviceBytes) and self._device_pool is not None:
            self._device_pool.submit(request)
        else:
            super().submit(request)

    def _transfer_device_bytes(self, request: IORequest) -> int:
        memory: Any = request.memory
        file, offset = self.volume.locate(request.offset)
        call = self._driver.read if request.direction is Direction.READ else self._driver.write
        return call(self._handles[file.fd], memory, offset)

    def stop(self, timeout_seconds: float) -> bool:
        """End all threads, and have cuFile let go of the files if none hangs in it."""
        deadline = time.monotonic() + timeout_seconds
        has_ended = self._device_pool is None or self._device_pool.close(timeout_seconds)
        if has_ended:
            self._deregister()
        return super().stop(max(0.0, deadline - time.monotonic())) and has_ended

    def _deregister(self) -> None:
        with self._lock:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            try:
                self._driver.deregister(handle)
            except Exception:
                logger.warning("cuFile did not let go of a file", exc_info=True)
