"""io_uring: many transfers in flight from one thread; and the test that it must pass before it gets a model."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest, Step, ended
from swapper.backends.uring.ring_loop import RingLoop
from swapper.backends.volume_backend import VolumeBackend
from swapper.backends.workers import Workers
from swapper.config import ALIGNMENT
from swapper.errors import ArgumentError, error_words
from swapper.memory.region import AlignedRegion
from swapper.sync.lifetimes import call_when_collected
from swapper.sync.limits import join_all
from swapper.volumes.volume import Volume

logger = logging.getLogger(__name__)

MAX_QUEUE_DEPTH = 4096  # a ring has 2 x 4096 + 1 entries then, rounded up to 16384; the kernel allows 32768
_NUM_BOUNCE_THREADS = 2  # few requests are unaligned
TEST_BYTES = 4 * ALIGNMENT  # written to each file, and restored
_MAX_STRIPES = 1024  # to look through for one of each file
_TIMEOUT_SECONDS = 10.0  # of each transfer

Bytes = npt.NDArray[np.uint8]


class UringBackend(VolumeBackend):
    """A volume, the ring that transfers its bytes, and threads for what must be bounced.

    Args:
        volume: Where the bytes go; closed together with the backend.
        queue_depth: So many reads and so many writes are in flight at once.

    Raises:
        BackendUnavailableError: The system does not allow io_uring, or the ``liburing`` package is missing.
    """

    def __init__(self, volume: Volume, queue_depth: int = 32) -> None:
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise ArgumentError(f"queue_depth must be from 1 to {MAX_QUEUE_DEPTH}, got {queue_depth}")
        super().__init__(volume)
        self.concurrency = queue_depth
        self._lock = threading.RLock()  # guards _bouncing
        self._bouncing: Workers | None = None
        self._has_complained = False
        self._loop = RingLoop([file.fd for file in volume.files], queue_depth)
        self.on_put = self._loop.on_put
        call_when_collected(self, self._loop.stop)  # the loop does not refer to its backend

    def describe(self) -> str:
        """Return one line for logs."""
        return f"uring: {self.volume.describe()}, {self.concurrency} reads and {self.concurrency} writes in flight"

    def submit(self, request: IORequest) -> None:
        """Hand the request to the ring; see [Note: bounced transfers] in `VolumeBackend` for what it does not take."""
        step = self.step_of(request)
        if step is not None:
            put, job = step
            put(job)
            self.on_put()
            return
        if self._loop.is_stopping:
            request.complete(0, ended("the ring's thread has"))
            return
        with self._lock:
            if self._bouncing is None:  # few need it
                self._bouncing = Workers("bounce", _NUM_BOUNCE_THREADS)
        file_ranges = self.volume.file_ranges(request.offset, len(request.memory))
        if not self._bouncing.submit(partial(self.transfer, request, file_ranges, request.complete)):
            request.complete(0, ended("the worker threads have"))

    def step_of(self, request: IORequest) -> Step | None:
        """See `IOBackend`."""
        offset, num_bytes = request.offset, len(request.memory)
        # block_bytes > 1: a file is direct. The OR is aligned only if offset, address and length are.
        is_bounced = self.block_bytes > 1 and (offset | request.address | num_bytes) % ALIGNMENT
        if is_bounced or self._loop.is_stopping:
            return None
        column, file_offset, *_ = self.volume.file_ranges(offset, num_bytes)[0]  # the only one: see boundary_bytes
        return self._loop.puts[request.direction], (request, column, file_offset)

    def register_memory(self, region: AlignedRegion) -> Callable[[], None]:
        """Have the kernel pin memory once, instead of for each transfer of bytes inside it.

        All pages of the region are in memory from now on. The region stays mapped until it is unregistered, also after
        its release. If the kernel refuses, transfers work without it, and one line in the log says why.

        Returns:
            A function that unregisters it. It does nothing if it is called again, or after the backend was closed.
        """
        registration = object()
        region.registrations.add(registration)  # before the kernel pins pages: AlignedRegion.discard must spare them
        try:
            slots = self._loop.call(lambda memory: memory.add(region))
        except OSError as error:
            region.registrations.discard(registration)
            self._complain(region.num_bytes, error)
            slots = []

        def unregister() -> None:
            if slots:
                given, slots[:] = list(slots), []  # emptied first: a second call does nothing
                with contextlib.suppress(OSError):
                    self._loop.call(lambda memory: memory.remove(given))
                    region.registrations.discard(registration)

        return unregister

    def _complain(self, num_bytes: int, error: OSError) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        logger.warning(
            "%d bytes of memory are not registered with io_uring (%s; the limit on locked memory, ulimit -l, is %s): "
            "its transfers take the ordinary way, at a little more CPU time",
            num_bytes,
            error_words(error),
            "infinite" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
        )

    def stop(self, timeout_seconds: float) -> bool:
        """End the threads and leave the files open for another backend; return whether all ended in time."""
        self._loop.stop()
        threads = [self._loop.thread]
        if self._bouncing is not None:
            self._bouncing.stop()
            threads += self._bouncing.threads
        has_ended = join_all(threads, timeout_seconds)
        return self._loop.close(0.0) and has_ended  # no more waiting: the thread was joined above


def find_fault(backend: UringBackend) -> str:
    """Write and read a few blocks of each file through the ring, and check every byte by ordinary reads and writes.

    It does so with ordinary and with registered memory. The former contents of the files are restored.

    Returns:
        A description of the fault; empty if there is none.
    """
    region = AlignedRegion(2 * TEST_BYTES)  # one half to write from, the other to read into
    memory = region.array()
    for kind in ("ordinary", "registered"):
        with contextlib.ExitStack() as stack:
            if kind == "registered":
                stack.callback(backend.register_memory(region))
            for offset, num_bytes in _places(backend.volume):
                fault = _try_place(backend, offset, memory[:num_bytes], memory[TEST_BYTES : TEST_BYTES + num_bytes])
                if fault:
                    return f"its self-test with {kind} memory failed: {fault}"
    return ""


def _places(volume: Volume) -> list[tuple[int, int]]:
    """An address in each file, and how many bytes can be used there."""
    found: dict[int, tuple[int, int]] = {}
    num_bytes = min(volume.capacity_bytes, (volume.stripe_bytes or TEST_BYTES) * _MAX_STRIPES)
    for column, _, low, high in volume.file_ranges(0, num_bytes):
        if low < high:
            found.setdefault(column, (low, min(TEST_BYTES, high - low)))
    return list(found.values())


def _try_place(backend: UringBackend, offset: int, data: Bytes, copy: Bytes) -> str:
    file, file_offset = backend.volume.locate(offset)
    before = AlignedRegion(data.size).array()
    try:
        os.preadv(file.fd, [before.data], file_offset)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    random = np.random.default_rng(1)
    try:
        # Each direction is checked by an ordinary system call: a ring that writes to a wrong place, and reads from the
        # same one, would find its own bytes right.
        data[:] = random.integers(0, 256, data.size, np.uint8)
        fault = _transfer(backend, Direction.WRITE, offset, data)
        if not fault:
            os.preadv(file.fd, [copy.data], file_offset)
            fault = _compare(data, copy, f"written to {file.name}")
        if not fault:
            data[:] = random.integers(0, 256, data.size, np.uint8)
            os.pwritev(file.fd, [data.data], file_offset)
            copy[:] = 0
            fault = _transfer(backend, Direction.READ, offset, copy) or _compare(data, copy, f"read from {file.name}")
        return fault
    except OSError as error:
        return f"{file.name} cannot be used: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.pwritev(file.fd, [before.data], file_offset)


def _compare(expected: Bytes, found: Bytes, what: str) -> str:
    num_wrong = int((expected != found).sum())
    return f"{num_wrong} of {expected.size} bytes {what} differ" if num_wrong else ""


def _transfer(backend: UringBackend, direction: Direction, offset: int, array: Bytes) -> str:
    name, answer = direction.name.lower(), queue.SimpleQueue[tuple[int, OSError | None]]()
    address: int = array.__array_interface__["data"][0]
    backend.submit(IORequest(direction, offset, array.data, address, lambda _, *outcome: answer.put(outcome)))
    try:
        moved_bytes, error = answer.get(timeout=_TIMEOUT_SECONDS)
    except queue.Empty:
        return f"a {name} had no answer for {_TIMEOUT_SECONDS:g} seconds"
    if error is not None:
        return f"a {name} failed: {error}"
    return "" if moved_bytes == array.size else f"a {name} moved {moved_bytes} of {array.size} bytes"
