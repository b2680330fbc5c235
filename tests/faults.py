"""A backend that does wrong what it is told to do wrong, to test what is above it."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from swapper.backend import Direction, IOBackend, IORequest
from swapper.sync.callbacks import call_back
from swapper.sync.limits import start_threads
from swapper.wrappers.base import BackendWrapper


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Which requests go wrong, and how. What is left out matches everything, and does nothing.

    Attributes:
        direction: Only reads or only writes.
        offset: Only requests that touch this byte of the address space.
        nth: Only the nth request that matches so far, counted from 1.
        times: Only so many of them.
        errno: Fail with this error number, without a transfer.
        delay_seconds: Reach the inner backend so much later.
        short_bytes: Transfer at most so many bytes, and say so.
        flipped_bit: Flip this bit of the transferred bytes (modulo their number), and say nothing.
        hangs: Do not complete before :meth:`FaultInjectingBackend.release_hung`.
    """

    direction: Direction | None = None
    offset: int | None = None
    nth: int | None = None
    times: int | None = None
    errno: int | None = None
    delay_seconds: float = 0.0
    short_bytes: int | None = None
    flipped_bit: int | None = None
    hangs: bool = False

    def fires(self, request: IORequest, counts: Counter[str]) -> bool:
        """Return whether the rule applies to this request, and count that."""
        is_of_direction = self.direction is None or self.direction is request.direction
        is_there = self.offset is None or request.offset <= self.offset < request.offset + len(request.memory)
        if not (is_of_direction and is_there) or (self.times is not None and counts["fired"] >= self.times):
            return False
        counts["matched"] += 1
        does_fire = self.nth is None or counts["matched"] == self.nth
        counts["fired"] += does_fire
        return does_fire


class FaultInjectingBackend(BackendWrapper):
    """Knows rules by which requests go wrong; the first rule that fires decides. Thread safe.

    Args:
        inner: The backend that does the work.
        rules: What goes wrong from the start.
    """

    def __init__(self, inner: IOBackend, rules: Iterable[FaultRule] = ()) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._rules: list[tuple[FaultRule, Counter[str]]] = [(rule, Counter()) for rule in rules]
        """Each with how often it has matched, and fired."""
        self._hung: list[IORequest] = []
        self._delays = DelayLine()
        self._num_faults = 0

    @property
    def num_faults(self) -> int:
        """Requests that went wrong so far."""
        return self._num_faults

    @property
    def num_hung(self) -> int:
        """Requests that hang now."""
        return len(self._hung)

    def add(self, rule: FaultRule) -> None:
        """Have more go wrong from now on."""
        with self._lock:
            self._rules.append((rule, Counter()))

    def clear(self) -> None:
        """Have nothing go wrong from now on; what hangs goes on hanging."""
        with self._lock:
            self._rules.clear()

    def release_hung(self) -> None:
        """Carry out all requests that hang."""
        with self._lock:
            hung, self._hung = self._hung, []
        for request in hung:
            self.inner.submit(request)

    def submit(self, request: IORequest) -> None:
        """Pass the request on, or do it wrong."""
        with self._lock:
            rule = next((rule for rule, counts in self._rules if rule.fires(request, counts)), None)
            if rule is not None:
                self._num_faults += 1
                if rule.hangs:
                    self._hung.append(request)
                    return
        if rule is None:
            self.inner.submit(request)
        else:
            self._delays.call_later(rule.delay_seconds, lambda: self._do_wrong(request, rule))

    def _do_wrong(self, request: IORequest, rule: FaultRule) -> None:
        if rule.errno is not None:
            request.complete(0, OSError(rule.errno, os.strerror(rule.errno)))
            return
        memory, address = request.memory, request.address
        if rule.short_bytes is not None:
            memory = memory[: rule.short_bytes]
        if rule.flipped_bit is not None and request.direction is Direction.WRITE:
            wrong = np.frombuffer(memory, dtype=np.uint8).copy()
            _flip(wrong.data, rule.flipped_bit)
            memory, address = wrong.data, wrong.__array_interface__["data"][0]

        def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
            if rule.flipped_bit is not None and request.direction is Direction.READ:
                _flip(memory[:transferred_bytes], rule.flipped_bit)
            request.complete(transferred_bytes, error)

        if len(memory) == 0:
            request.complete(0)
        else:
            self.inner.submit(IORequest(request.direction, request.offset, memory, address, complete))

    def close(self, timeout_seconds: float) -> bool:
        """Close the inner backend; return false if something hangs, as with a real drive."""
        self._delays.close()
        is_ended = self.inner.close(timeout_seconds)
        return is_ended and not self._hung


def _flip(memory: memoryview, bit: int) -> None:
    if len(memory):
        memory[bit // 8 % len(memory)] ^= 1 << (bit % 8)


class DelayLine:
    """Knows functions and when they are due, and calls them on a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call the function after so many seconds; at once if there is nothing to wait for."""
        with self._lock:
            is_due = seconds <= 0 or self._is_closed
            if not is_due:
                heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="swapper-delay", daemon=True)
                    start_threads(thread)
                    self._thread = thread
                self._changed.notify()
        if is_due:
            function()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._due and not self._is_closed:
                    self._changed.wait()
                if not self._due:
                    return
                wait_seconds = self._due[0][0] - time.monotonic()
                if wait_seconds > 0 and not self._is_closed:
                    self._changed.wait(wait_seconds)
                    continue
                _, _, function = heapq.heappop(self._due)
            call_back(function, "a delayed function")

    def close(self) -> None:
        """Call everything that still waits now, and stop the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
