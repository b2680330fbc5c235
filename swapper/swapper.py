"""The public class: named extents of storage, read into and written from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from swapper.backend import Direction, IOBackend, register_memory
from swapper.backends.memory import MemoryBackend
from swapper.config import Priority, SwapperConfig, whole_number
from swapper.errors import ArgumentError, ExtentError, SwapperClosedError
from swapper.extents.extent import Extent, NameOf
from swapper.measure.choice import open_backend
from swapper.measure.speeds import with_speeds
from swapper.memory.buffer import Buffer
from swapper.memory.region import AlignedRegion
from swapper.meters import BusyTimes, Observer
from swapper.scheduling.operation import Handle, Operation
from swapper.scheduling.scheduler import IOScheduler
from swapper.scheduling.statistics import Statistics
from swapper.sync import switching
from swapper.sync.lifetimes import call_when_collected
from swapper.sync.limits import limits_in_words
from swapper.uncopyable import Closable, closed_unless_made
from swapper.volumes.directory import DirectoryLike
from swapper.volumes.volume import Volume
from swapper.wrappers.integrity import IntegrityBackend


class Swapper(Closable):
    """Allocates extents, and reads and writes them.

    You may call all methods from any thread. Requests return at once with a :class:`Handle`. If nobody waits for a
    failed handle, the next call raises its error. In a forked child requests raise, and :meth:`close` does nothing. A
    signal handler or finalizer that would spoil an interrupted call gets a ``ReentryError``.

    Args:
        backend: Moves the bytes; closed together with the swapper.
        config: How to use it.
        busy: A total over several swappers that this one's busy times are added to.
        is_prewritten: All extents may be read before they are written: see :meth:`allocate`.
    """

    def __init__(
        self,
        backend: IOBackend,
        config: SwapperConfig | None = None,
        *,
        busy: BusyTimes | None = None,
        is_prewritten: bool = False,
    ) -> None:
        self.config = config or SwapperConfig()
        self._is_prewritten = is_prewritten
        self._backend = backend
        self._scheduler = IOScheduler(backend, self.config, busy)
        self._allocator = self._scheduler.allocator
        self._pid = os.getpid()
        self._is_closed = False
        switching.acquire(id(self))  # see [Note: switch interval] in swapper.sync.switching
        call_when_collected(self, switching.release, id(self))  # for a swapper that nobody closes

    @classmethod
    def open(
        cls,
        directories: Sequence[DirectoryLike] | DirectoryLike,
        capacity_bytes: int,
        config: SwapperConfig | None = None,
        *,
        busy: BusyTimes | None = None,
    ) -> Swapper:
        """Return a swapper that stores bytes on drives, one directory for each: paths, or :class:`Directory` objects.

        The space is reserved now. It is freed when the swapper is closed, or when the process ends in any way.

        Raises:
            VolumeError: A subclass says what is wrong with which directory; nothing was left behind.
            LimitError: The system gives no more threads, memory or open files; likewise.
        """
        config = config or SwapperConfig()
        capacity_bytes = whole_number("capacity_bytes", capacity_bytes)
        with limits_in_words():
            # Before the volume: drives are measured in scratch files of their own, which need space as well.
            directories = with_speeds(directories, capacity_bytes, direct=config.direct)
            # A stripe is as long as a request, so that a request of that length is on one drive.
            volume = Volume(directories, capacity_bytes, stripe_bytes=config.request_bytes, direct=config.direct)
            with closed_unless_made(volume.close):  # until the backend owns the volume, and the swapper the backend
                backend = open_backend(volume, config)
            with closed_unless_made(backend.close, config.deadline_seconds):
                return cls(_verified(backend, config), config, busy=busy)

    @classmethod
    def in_memory(cls, capacity_bytes: int, config: SwapperConfig | None = None) -> Swapper:
        """Return a swapper that stores bytes in host memory, copied by worker threads."""
        config = config or SwapperConfig()
        capacity_bytes = whole_number("capacity_bytes", capacity_bytes)
        with limits_in_words():
            backend = MemoryBackend(capacity_bytes, config.num_threads)
            with closed_unless_made(backend.close, config.deadline_seconds):
                return cls(_verified(backend, config), config)

    @property
    def backend(self) -> IOBackend:
        """What moves the bytes."""
        return self._backend

    @property
    def capacity_bytes(self) -> int:
        """Size of the storage."""
        return self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Storage that belongs to no extent."""
        return self._allocator.free_bytes

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._is_closed

    def allocate(
        self, num_bytes: int, name: str, *, is_prewritten: bool = False, name_of: NameOf | None = None
    ) -> Extent:
        """Return a new extent of ``num_bytes``, rounded up to 4096; nothing can be read from it before a write.

        Args:
            num_bytes: Size wanted.
            name: What error messages call it.
            is_prewritten: It may be read at once, because an earlier swapper on the same files has written it.
            name_of: ``name_of(start, stop)`` returns, for error messages, what is stored in these bytes.

        Raises:
            OutOfSpaceError: There is no room for it.
            ReentryError: A signal handler asks, in the midst of another call.
        """
        self._check_usable()
        num_bytes = whole_number("num_bytes", num_bytes)
        start = self._allocator.allocate(num_bytes, name)
        is_prewritten = is_prewritten or self._is_prewritten
        return Extent(name, start, num_bytes, self, is_prewritten=is_prewritten, name_of=name_of)

    def free(self, extent: Extent) -> None:
        """Wait for the requests of an extent and free its space.

        If a transfer hangs, or the wait is interrupted, the space is freed when the transfer has ended. You may repeat
        an interrupted call.

        Raises:
            ExtentError: It was freed before, or belongs to another swapper.
            StallError: A request does not end.
            ReentryError: A signal handler asks, in the midst of another call.
        """
        self._check_owned(extent)
        self._scheduler.release(extent)

    def read(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        offset: int = 0,
        num_bytes: int | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Handle:
        """Start copying bytes of an extent into memory.

        Args:
            extent: Where from.
            buffer: Where to: a contiguous CPU tensor of any dtype, a numpy array, or a writable buffer. The handle
                keeps it alive; do not use its bytes before the handle is done. If address, offset and length are
                multiples of 4096, direct I/O needs no copy.
            offset: First byte in the extent.
            num_bytes: How many; the whole buffer by default.
            priority: What is served first.

        Raises:
            ExtentError: Some bytes were never written, or their last write failed (if that is still running, the handle
                raises); or the extent was freed.
            ArgumentError: They are not all inside the extent, or the memory cannot be used.
            SwapperClosedError: The swapper was closed.
            SwapperError: An earlier request failed and nobody waited for it.
        """
        if self._is_closed or getattr(extent, "owner", None) is not self:
            self._check_owned(extent)
        scheduler = self._scheduler
        handle = Operation(scheduler, Direction.READ, extent, offset, buffer, priority, num_bytes)
        scheduler.submit(handle)
        return handle

    def write(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        offset: int = 0,
        num_bytes: int | None = None,
        priority: Priority = Priority.WRITE_BACK,
        then: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Start copying memory into an extent.

        Reads and writes of the same bytes that are started later see this one finished. If it fails, its bytes cannot
        be read until they are written again.

        Args:
            extent: Where to.
            buffer: Where from; see :meth:`read`. Do not change its bytes before the handle is done.
            offset: First byte in the extent.
            num_bytes: How many; the whole buffer by default.
            priority: What is served first.
            then: As given to :meth:`Handle.add_done_callback`. It may run before this returns.

        Raises:
            ArgumentError, ExtentError, SwapperClosedError, SwapperError: See :meth:`read`.
        """
        if self._is_closed or getattr(extent, "owner", None) is not self:
            self._check_owned(extent)
        scheduler = self._scheduler
        handle = Operation(scheduler, Direction.WRITE, extent, offset, buffer, priority, num_bytes, then)
        scheduler.submit(handle)
        return handle

    def flush(self) -> None:
        """Wait until all writes started so far are over, then raise the first error that nobody has seen."""
        self._check_usable()
        self._scheduler.wait_for_writes()
        self._scheduler.pending.raise_first()

    def raise_pending(self) -> None:
        """Raise the first error of a request that nobody waited for, if there is one."""
        self._check_usable()
        self._scheduler.pending.raise_first()

    def register_memory(self, region: AlignedRegion) -> Callable[[], None]:
        """Register memory that many requests will use: io_uring then pins it once, which saves CPU time.

        Until you undo that, the region stays mapped, and its pages must not be given to the kernel with MADV_DONTNEED.

        Returns:
            A function that undoes it.
        """
        self._check_usable()
        return register_memory(self._backend, region)

    def statistics(self) -> Statistics:
        """Return counters and gauges."""
        return self._scheduler.statistics()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with a `TransferRecord` after each transfer that begins from now on.

        Threads of the backend call it, also several at once, so it should be quick. Transfers come in about the order
        in which they end.

        Returns:
            A function that ends it.
        """
        return self._scheduler.observers.add(observer)

    def describe(self) -> str:
        """Return one line that says where the bytes go and how."""
        return self._backend.describe()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Drop waiting requests, let running ones end, and release everything. Idempotent.

        Requests that were dropped fail with ``SwapperClosedError``. Errors that nobody has seen are logged.

        Args:
            timeout_seconds: How long running requests may take to end; the deadline by default. Hung ones stay open.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._scheduler.close("the swapper has been closed; open a new one", timeout_seconds)
        self._is_closed = True  # only now: a close that an interrupt cuts off can be repeated
        switching.release(id(self))

    def _check_usable(self) -> None:
        if self._is_closed:
            raise SwapperClosedError("the swapper has been closed; open a new one")
        self._scheduler.check_process()

    def _check_owned(self, extent: Extent) -> None:
        self._check_usable()
        if not isinstance(extent, Extent):
            raise ArgumentError(f"an extent is needed, got {extent!r}; pass what allocate() returned")
        if extent.owner is not self:
            raise ExtentError(extent.name, f"extent {extent.name!r} belongs to another swapper")


def _verified(backend: IOBackend, config: SwapperConfig) -> IOBackend:
    if not config.verify_checksums:
        return backend
    # Requests are always cut at multiples of request_bytes, so they seldom cover a part of a checksum's page.
    return IntegrityBackend(backend, boundary_bytes=config.request_bytes)
