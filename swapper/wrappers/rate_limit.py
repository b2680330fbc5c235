"""A backend that is no faster than it is told: a slower drive than the one that is there."""

from __future__ import annotations

import math
import threading
import time

from swapper.backend import Direction, IOBackend, IORequest
from swapper.errors import ArgumentError
from swapper.wrappers.base import BackendWrapper, DelayLine

_BURST_SECONDS = 0.005


class RateLimitBackend(BackendWrapper):
    """Knows how many bytes per second may pass in each direction, and tells of the end of a transfer no sooner.

    Requests reach the inner backend at once. Each has its share of the time, one after the other, and is completed when
    that is over: so one request at a time is as fast as many. Time that goes unused is made up for by a burst of 5 ms
    at most.

    Args:
        inner: The backend that does the work.
        read_bytes_per_second: Limit for reads; none by default.
        write_bytes_per_second: Limit for writes; none by default.

    Raises:
        ArgumentError: A limit is not positive.
    """

    def __init__(
        self,
        inner: IOBackend,
        read_bytes_per_second: float = math.inf,
        write_bytes_per_second: float = math.inf,
    ) -> None:
        super().__init__(inner)
        self._rates = {Direction.READ: read_bytes_per_second, Direction.WRITE: write_bytes_per_second}
        for direction, rate in self._rates.items():
            if not rate > 0:
                raise ArgumentError(f"{direction.name.lower()}_bytes_per_second must be positive, got {rate}")
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._delays = DelayLine()

    def describe(self) -> str:
        """Return the inner backend's description and the limits."""
        limits = [f"{d.name.lower()}s up to {rate / 1e6:g} MB/s" for d, rate in self._rates.items() if rate < math.inf]
        return ", ".join([super().describe(), *limits])

    def submit(self, request: IORequest) -> None:
        """Pass the request on at once, and its completion when its time is over."""
        now = time.monotonic()
        direction = request.direction
        with self._lock:
            begin = max(self._free_at[direction], now - _BURST_SECONDS)
            due = self._free_at[direction] = begin + len(request.memory) / self._rates[direction]

        def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
            self._delays.call_later(due - time.monotonic(), lambda: request.complete(transferred_bytes, error))

        self.inner.submit(
            IORequest(direction, request.offset, request.memory, request.address, complete, request.may_pad)
        )

    def close(self, timeout_seconds: float) -> bool:
        """Pass on what still waits, and close the inner backend."""
        self._delays.close()
        return self.inner.close(timeout_seconds)
