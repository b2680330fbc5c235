"""A fixed number of equal buffers of host memory, leased and returned."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from swapper.config import ALIGNMENT, bounded_seconds, whole_number
from swapper.errors import ArgumentError, StagingExhaustedError, SwapperClosedError
from swapper.memory.held import tenants
from swapper.memory.region import AlignedRegion
from swapper.sync import interrupts
from swapper.sync.reentry import refuse_owned
from swapper.uncopyable import Closable, Uncopyable, closed_unless_made

logger = logging.getLogger(__name__)

# A waiting lease looks again after so long, because some events have no notification:
_LOOK_UP_SECONDS = 1.0  # a leased buffer was garbage-collected
_HELD_SECONDS = 0.01  # a transfer has ended that used a buffer after its release; soon, as the transfer is running
_NUM_PAUSES = 16  # a stopped process loses at most 1/16 of its timeout

Pin = Callable[[int, int], Callable[[], None] | None]
"""``pin(address, num_bytes)`` registers memory with a device's driver and returns what undoes it; None if it cannot."""


class StagingBuffer(Uncopyable):
    """The lease of one buffer. A context manager that releases it.

    Attributes:
        index: Which buffer of the staging pool it is.
        num_bytes: Its size.
        owner: The name that `StagingPool.lease` was given.
    """

    __slots__ = ("_staging_pool", "_tensor", "index", "num_bytes", "owner")

    def __init__(self, staging_pool: StagingPool, owner: str) -> None:
        """Take the buffer that was released last. The caller holds the lock of the pool, which has a free one."""
        self._staging_pool = staging_pool
        self.index = index = staging_pool.free[-1]
        self.num_bytes = num_bytes = staging_pool.buffer_bytes
        self.owner = owner
        # An array of its own for each lease: views of it refer to it, so it dies with the last of them.
        array = staging_pool._whole[index * num_bytes : (index + 1) * num_bytes]
        self._tensor: torch.Tensor | None = torch.from_numpy(array)
        staging_pool._leased[index] = weakref.ref(array), owner
        staging_pool.free.remove(index)  # a finalizer may have given another one back in between

    def __repr__(self) -> str:
        state = "released" if self._tensor is None else "leased"
        return f"StagingBuffer({self.index}, {self.num_bytes} bytes, {state}, owner={self.owner!r})"

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tensor is not None:
            self.release()

    @property
    def is_released(self) -> bool:
        """Whether it has been given back."""
        return self._tensor is None

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer's bytes: a 1-D uint8 tensor, a view of the staging pool. Do not use it after the release."""
        if self._tensor is None:
            raise SwapperClosedError(
                f"buffer {self.index} of {self.owner or 'an unnamed owner'} was released; lease another one"
            )
        self._staging_pool.check_process()
        return self._tensor

    def release(self) -> None:
        """Give the buffer back. It is leased again when no request uses it any more.

        Raises:
            SwapperClosedError: It was given back already.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise SwapperClosedError(
                f"buffer {self.index} of {self.owner or 'an unnamed owner'} was released twice, which would let "
                "two owners write to it; release each lease once"
            )
        # Without the lock, see [Note: giving back].
        staging_pool, index = self._staging_pool, self.index
        staging_pool._released[self] = index
        del staging_pool._leased[index], tensor
        # A request still uses it: then _look_again() finds it when the request has ended.
        if not tenants(staging_pool._address + index * self.num_bytes, self.num_bytes):
            try:  # noqa: SIM105 (called for each chunk: a context manager takes several times as long)
                staging_pool.free.extend(map(staging_pool._released.pop, (self,)))
            except KeyError:  # _look_again() on another thread was faster
                pass
            if staging_pool._num_waiting:
                with staging_pool._lock:
                    staging_pool._available.notify()


class StagingPool(Closable):
    """Equal buffers of one aligned region, leased and returned. Thread safe.

    A buffer is leased again only after its release, and after the end of all reads and writes that use it, whether
    somebody waits for them or not (see [Note: whose memory it is] in ``swapper.memory.held``). A leased buffer whose
    last reference is gone, after an interrupt for example, counts as released.

    [Note: giving back]
    A buffer is leased under the lock, but its release takes none: it comes with each write that ends, on the threads of
    a backend. Each of its steps is a single one under the interpreter's lock, and an interrupt between two loses nothing:

        free        -> _leased      under the lock: put into _leased, taken out of free
        _leased     -> _released    put into _released by a key of its own, taken out of _leased
        _released   -> free         one step; of two threads, the key tells which one does it

    While a buffer is still in _leased, nobody but its release moves it, as that keeps the array alive.

    Args:
        buffer_bytes: Size of a buffer, a multiple of 4096.
        num_buffers: Number of buffers.
        pin: Registers the whole region with a device's driver, once.
        deadline_seconds: How long a lease waits for a buffer unless told otherwise.
    """

    def __init__(
        self, buffer_bytes: int, num_buffers: int, pin: Pin | None = None, *, deadline_seconds: float = 120.0
    ) -> None:
        buffer_bytes, num_buffers = whole_number("buffer_bytes", buffer_bytes), whole_number("num_buffers", num_buffers)
        if buffer_bytes <= 0 or buffer_bytes % ALIGNMENT:
            raise ArgumentError(f"buffer_bytes must be a positive multiple of {ALIGNMENT}, got {buffer_bytes}")
        if num_buffers <= 0:
            raise ArgumentError(f"a staging pool needs at least one buffer, got num_buffers={num_buffers}")
        self._pid = interrupts.pid
        self.buffer_bytes = buffer_bytes
        self.num_buffers = num_buffers
        self._deadline_seconds = bounded_seconds(deadline_seconds, "deadline_seconds")
        self._pin = pin
        self._register: list[Callable[[AlignedRegion], Callable[[], None]]] = []
        self._unregister: list[Callable[[], None]] = []
        self._map()
        # A stack: the buffer released last is leased first. The kernel has backed it already, and it may still be in
        # the cache.
        self.free = list(range(num_buffers - 1, -1, -1))
        """Which buffers can be leased now: always the same list. Anybody may look at it."""
        # The array, which lives as long as any view of the buffer, and the owner.
        self._leased: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], str]] = {}
        # By a key of each release, the buffers that are released and not free: those that a transfer uses, as a rule.
        self._released: dict[object, int] = {}
        self._num_waiting = 0  # leases, each of which a release notifies
        # Guards all but the region and releases; see [Note: coming in between] in swapper.sync.reentry.
        self._lock = threading.RLock()
        self._available = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._is_refusing = self._is_closed = False

    def _map(self) -> None:
        """Allocate the memory, and make it known to the driver and to those who want to know it."""
        region = AlignedRegion(self.buffer_bytes * self.num_buffers)
        with closed_unless_made(region.release):
            self._unpin = self._pin(region.address, region.num_bytes) if self._pin is not None else None
        if self._unpin is not None:
            region.registrations.add(self)
        self._region, self._address, self._whole = region, region.address, region.array()
        self._has_memory = True
        for register in self._register:
            self._unregister.append(register(region))

    def _unmap(self) -> None:
        """The counterpart of `_map`. Views keep the memory mapped, but it is not pinned any more."""
        self._has_memory = False
        self._whole = self._whole[:0].copy()  # drop the pool's own view of the region
        # Outside of the lock: to unregister waits for the thread of the ring, whose callbacks may release buffers.
        for unregister in self._unregister:
            unregister()
        self._unregister.clear()
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._region.release()

    @property
    def num_bytes(self) -> int:
        """Size of the staging pool in host memory."""
        return self._region.num_bytes

    def check_process(self) -> None:
        """Raise `SwapperClosedError` in a forked child, which does not have the memory."""
        if interrupts.pid != self._pid:
            raise SwapperClosedError(
                f"this staging pool belongs to process {self._pid}; a forked child must make its own"
            )

    @property
    def is_pinned(self) -> bool:
        """Whether a device's driver knows the region."""
        return self._unpin is not None

    def register_with(self, register: Callable[[AlignedRegion], Callable[[], None]]) -> None:
        """Register the memory until the staging pool is closed.

        Args:
            register: Gets the region and returns a function that undoes it: `Swapper.register_memory`, for example.
        """
        self._register.append(register)
        if self._has_memory:
            self._unregister.append(register(self._region))

    def release_memory(self) -> None:
        """Give the memory back until `allocate_memory`, once no buffer is held. No buffer is leased in between.

        Raises:
            StagingExhaustedError: Somebody still holds one at the deadline; the pool is as before.
        """
        with self._lock:
            if self._is_closed or not self._has_memory:
                return
            self._wait(lambda: len(self.free) == self.num_buffers, self._deadline_seconds)
            self.free.clear()
            self._has_memory = False
        self._unmap()

    def allocate_memory(self) -> None:
        """Take back what `release_memory` gave back; the contents are undefined. Does nothing if it was not called."""
        if self._is_closed or self._has_memory:
            return
        with closed_unless_made(self._unmap):
            self._map()
        with self._lock:
            self.free[:] = range(self.num_buffers - 1, -1, -1)
            self._available.notify_all()

    def lease(self, timeout_seconds: float | None = None, *, owner: str = "") -> StagingBuffer:
        """Return a buffer as soon as there is one; its content is undefined.

        Args:
            timeout_seconds: How long to wait at most; the staging pool's deadline by default.
            owner: Names the holder in error messages of others that wait.

        Raises:
            StagingExhaustedError: No buffer became free in time; names who holds them.
            SwapperClosedError: The staging pool has been closed, or belongs to the parent of this process.
            ReentryError: A signal handler asks, in the midst of another lease.
        """
        self.check_process()
        refuse_owned(self._lock, "leasing a buffer")
        timeout_seconds = self._deadline_seconds if timeout_seconds is None else bounded_seconds(timeout_seconds)
        with self._lock:
            if not self.free:  # closed: it raises at once
                self._wait(lambda: bool(self.free) or self._is_refusing, timeout_seconds)
            if self._is_refusing:
                raise self._refusal()
            return StagingBuffer(self, owner)

    def try_lease(self, *, owner: str = "") -> StagingBuffer | None:
        """Return a buffer if one is free now."""
        if interrupts.pid != self._pid:
            self.check_process()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            refuse_owned(self._lock, "leasing a buffer")
        with self._lock:
            if self._is_refusing:
                raise self._refusal()
            if not self.free:
                self._look_again()
            return StagingBuffer(self, owner) if self.free else None

    @staticmethod
    def _refusal() -> SwapperClosedError:
        return SwapperClosedError("the staging pool has been closed; no buffer can be leased from it any more")

    def _look_again(self) -> None:
        """Find buffers that came free without a notification."""
        if not self._has_memory:
            return
        # The last view of a leased buffer is gone, and with it every way to release the buffer. It may be in another
        # table already, if an interrupt came within its lease or its release.
        # Copies are one step. While `tuple` makes pairs, the collector may run, and another thread may release.
        for index, entry in self._leased.copy().items():
            array, _ = entry
            if array() is None and self._leased.get(index) is entry:  # else its release has just ended
                if index not in self.free and index not in self._released.values():
                    self._released[object()] = index
                del self._leased[index]
        for key, index in self._released.copy().items():
            if index not in self._leased and not tenants(self._address + index * self.buffer_bytes, self.buffer_bytes):
                with contextlib.suppress(KeyError):  # its release, on another thread, was faster
                    self.free.extend(map(self._released.pop, (key,)))

    def _wait(self, is_over: Callable[[], bool], timeout_seconds: float) -> None:
        """Sleep until ``is_over()``; raise `StagingExhaustedError` if that takes too long. The caller has the lock."""
        left_seconds = timeout_seconds
        most_seconds = max(timeout_seconds / _NUM_PAUSES, _HELD_SECONDS)
        self._num_waiting += 1  # before the look: a release that comes after it notifies
        try:
            while not is_over():
                self._look_again()
                if is_over():
                    return
                if left_seconds <= 0:
                    raise StagingExhaustedError(self.num_buffers, timeout_seconds, self._owners())
                # StagingBuffer.release() notifies. A transfer that ends after it does not: such a buffer is polled for.
                pause_seconds = _HELD_SECONDS if len(self._leased) < self.num_buffers else _LOOK_UP_SECONDS
                pause_seconds = min(left_seconds, pause_seconds, most_seconds)
                paused_seconds = time.monotonic()
                self._available.wait(pause_seconds)
                # A process that was stopped meanwhile (SIGSTOP, a debugger) has lost no more than this pause.
                left_seconds -= min(pause_seconds, time.monotonic() - paused_seconds)
        finally:
            self._num_waiting -= 1

    def _owners(self) -> list[tuple[str, int]]:
        owners = Counter(owner for _, owner in self._leased.copy().values())
        if self._released:
            owners["transfers that have not ended, although nobody waits for them any more"] = len(self._released)
        return owners.most_common()

    def memory_of(self, index: int) -> torch.Tensor:
        """The bytes of a buffer, 1-D uint8, for views that outlive its leases."""
        # A view of `StagingBuffer.tensor` would keep alive what tells that a lease was dropped without a release.
        return torch.from_numpy(self._whole[index * self.buffer_bytes : (index + 1) * self.buffer_bytes])

    @property
    def num_leased(self) -> int:
        """Buffers in use now, by an owner or by a transfer that outlives the lease."""
        with self._lock:
            self._look_again()
            return self.num_buffers - len(self.free)

    def stop_leasing(self) -> None:
        """Refuse all leases, also those that wait, with a ``SwapperClosedError``.

        Leased buffers stay usable. You still have to call `close`.
        """
        with self._lock:
            self._is_refusing = True
            self._available.notify_all()

    def close(self) -> None:
        """Unpin and release the memory; leases that wait get an error. Idempotent.

        No copy to or from a device may be running. Leased buffers keep the memory mapped, but not pinned, until their
        release.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_refusing = self._is_closed = True
            if self._leased:
                logger.warning("a staging pool was closed while buffers are held by %s", self._owners())
            self._available.notify_all()
        self._unmap()
