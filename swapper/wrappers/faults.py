"""A backend that does wrong what it is told to do wrong, to test what is above it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swapper.backend import Direction, IOBackend, IORequest
from swapper.wrappers.base import BackendWrapper, DelayLine


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

    def matches(self, request: IORequest) -> bool:
        """Return whether the rule is about such a request."""
        return (self.direction is None or self.direction is request.direction) and (
            self.offset is None or request.offset <= self.offset < request.offset + len(request.memory)
        )


class FaultInjectingBackend(BackendWrapper):
    """Knows rules by which requests go wrong; the first rule that fires decides. Thread safe.

    Args:
        inner: The backend that does the work.
        rules: What goes wrong from the start.
    """

    def __init__(self, inner: IOBackend, rules: Iterable[FaultRule] = ()) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._rules: list[_CountedRule] = [_CountedRule(rule) for rule in rules]
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
            self._rules.append(_CountedRule(rule))

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
            rule = next((counted.rule for counted in self._rules if counted.fires(request)), None)
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
            self.inner.submit(IORequest(request.direction, request.offset, memory, address, complete, request.may_pad))

    def close(self, timeout_seconds: float) -> bool:
        """Close the inner backend; return false if something hangs, as with a real drive."""
        self._delays.close()
        is_ended = self.inner.close(timeout_seconds)
        return is_ended and not self._hung


class _CountedRule:
    """Knows a rule and how often it has matched and fired."""

    def __init__(self, rule: FaultRule) -> None:
        self.rule = rule
        self._num_matches = 0
        self._num_fired = 0

    def fires(self, request: IORequest) -> bool:
        """Return whether the rule applies to this request."""
        rule = self.rule
        if not rule.matches(request) or (rule.times is not None and self._num_fired >= rule.times):
            return False
        self._num_matches += 1
        if rule.nth is not None and self._num_matches != rule.nth:
            return False
        self._num_fired += 1
        return True


def _flip(memory: memoryview, bit: int) -> None:
    if len(memory):
        memory[bit // 8 % len(memory)] ^= 1 << (bit % 8)
