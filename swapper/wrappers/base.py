"""Backends around another one: the same bytes, seen or slowed down on their way."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from swapper.backend import Direction, IOBackend, IORequest, register_memory
from swapper.memory.region import AlignedRegion


class BackendWrapper:
    """Knows another backend and passes everything on; subclasses change what they are about.

    Args:
        inner: The backend that does the work; closed together with this one.
    """

    def __init__(self, inner: IOBackend) -> None:
        self.inner = inner

    @property
    def capacity_bytes(self) -> int:
        """Size of the address space."""
        return self.inner.capacity_bytes

    @property
    def block_bytes(self) -> int:
        """See :class:`IOBackend`."""
        return self.inner.block_bytes

    @property
    def boundary_bytes(self) -> int:
        """See :class:`IOBackend`."""
        return self.inner.boundary_bytes

    @property
    def concurrency(self) -> int:
        """See :class:`IOBackend`."""
        return self.inner.concurrency

    @property
    def is_direct(self) -> bool:
        """See :class:`IOBackend`."""
        return self.inner.is_direct

    @property
    def num_bounced(self) -> int:
        """See :class:`IOBackend`."""
        return self.inner.num_bounced

    def locate(self, offset: int) -> tuple[str, int]:
        """See :class:`IOBackend`."""
        return self.inner.locate(offset)

    def describe(self) -> str:
        """Return the inner backend's description in the name of this class."""
        return f"{type(self).__name__}({self.inner.describe()})"

    def register_memory(self, region: AlignedRegion) -> Callable[[], None]:
        """See :class:`swapper.backend.MemoryRegistrar`."""
        return register_memory(self.inner, region)

    def submit(self, request: IORequest) -> None:
        """Pass the request on."""
        self.inner.submit(request)

    def close(self, timeout_seconds: float) -> bool:
        """Close the inner backend."""
        return self.inner.close(timeout_seconds)


def forwarded(request: IORequest, before_completion: Callable[[int, OSError | None], None]) -> IORequest:
    """Return a request for an inner backend that calls a function before it completes the outer one."""

    def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        before_completion(transferred_bytes, error)
        request.complete(transferred_bytes, error)

    return IORequest(request.direction, request.offset, request.memory, request.address, complete, request.may_pad)


class LoggingBackend(BackendWrapper):
    """Knows a logger and tells it every transfer.

    Args:
        inner: The backend that does the work.
        logger: Who is told; this module's logger by default.
        level: At which level.
    """

    def __init__(self, inner: IOBackend, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        super().__init__(inner)
        self._logger = logger or logging.getLogger(__name__)
        self._level = level

    def submit(self, request: IORequest) -> None:
        """Pass the request on, and log it when it is over."""
        if not self._logger.isEnabledFor(self._level):
            self.inner.submit(request)
            return
        started_seconds = time.perf_counter()

        def log(transferred_bytes: int, error: OSError | None) -> None:
            self._logger.log(
                self._level,
                "%s of %d bytes at %d: %d bytes in %.6f seconds%s",
                request.direction.name.lower(),
                len(request.memory),
                request.offset,
                transferred_bytes,
                time.perf_counter() - started_seconds,
                f", {error}" if error is not None else "",
            )

        self.inner.submit(forwarded(request, log))


class LatencyBackend(BackendWrapper):
    """Knows how much later requests reach the inner backend: a far or slow drive.

    Args:
        inner: The backend that does the work.
        read_seconds: Delay of every read.
        write_seconds: Delay of every write.
    """

    def __init__(self, inner: IOBackend, read_seconds: float = 0.0, write_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self._seconds = {Direction.READ: read_seconds, Direction.WRITE: write_seconds}
        self._delays = DelayLine()

    def submit(self, request: IORequest) -> None:
        """Pass the request on later."""
        self._delays.call_later(self._seconds[request.direction], lambda: self.inner.submit(request))

    def close(self, timeout_seconds: float) -> bool:
        """Pass on what still waits, and close the inner backend."""
        self._delays.close()
        return self.inner.close(timeout_seconds)


class DelayLine:
    """Knows functions and when they are due, and calls them on a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call the function after so many seconds; at once if there is nothing to wait for."""
        with self._changed:
            is_due = seconds <= 0 or self._is_closed
            if not is_due:
                heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="swapper-delay", daemon=True)
                    self._thread.start()
                self._changed.notify()
        if is_due:
            function()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due and not self._is_closed:
                    self._changed.wait()
                if not self._due:
                    return
                wait_seconds = self._due[0][0] - time.monotonic()
                if wait_seconds > 0 and not self._is_closed:
                    self._changed.wait(wait_seconds)
                    continue
                _, _, function = heapq.heappop(self._due)
            function()

    def close(self) -> None:
        """Call everything that still waits now, and stop the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
