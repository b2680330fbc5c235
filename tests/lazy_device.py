"""The CPU as a GPU with streams: copies run as late as they may, and fences have a time. Missing waits become visible."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from tests.internals import FlatBuffer, FlatPool
from tests.separate_host import SeparateHostDevice


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """From where to where a tensor without gaps lies in memory."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@dataclass(frozen=True)
class LazyFence:
    """``time``: when it was marked. ``copy``: number of the last copy that it follows, or -1."""

    time: int
    copy: int = -1


class LazyDevice(SeparateHostDevice):
    """Host to device copies are carried out when somebody waits for them, and not before, as on a busy stream.

    When the thread that trains lets its stream wait for a copy, the copy runs. When a background thread does, only what
    follows a later mark of that thread is sure to see it.

    Attributes:
        violations: what should have been ordered and was not, in words.
        num_lazy: copies that were carried out.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._lock = threading.RLock()
        self._clock = itertools.count(1)
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._num_copies = 0
        self._acquired: dict[int, int] = {}
        self._trains_in = threading.get_ident()
        self._waited: dict[int, int] = {}
        self.violations: list[str] = []
        self.num_lazy = 0

    def watch(self, pool: FlatPool) -> None:
        """Note when the pool hands out a buffer: kernels launched before may still use what lay there."""
        allocate = pool.allocate

        def watched(num_bytes: int) -> FlatBuffer | None:
            flat = allocate(num_bytes)
            if flat is not None:
                self._acquired[flat.address] = next(self._clock)
            return flat

        pool.allocate = watched  # type: ignore[method-assign]

    def mark(self) -> LazyFence:
        return LazyFence(next(self._clock), self._waited.get(threading.get_ident(), -1))

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> LazyFence:
        acquired = self._acquired.get(target.untyped_storage().data_ptr(), 0)
        if not isinstance(after, LazyFence) or after.time < acquired:
            self.violations.append(
                f"a copy into a buffer handed out at {acquired} follows {after}: kernels launched in between may still "
                f"use its memory (thread {threading.current_thread().name})"
            )
        with self._lock:
            number, self._num_copies = self._num_copies, self._num_copies + 1
            self._pending.append((number, target, source))
        return LazyFence(next(self._clock), number)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        self.synchronize(after)
        with self._lock:
            pending = [_bytes_of(copied) for _, copied, _ in self._pending]
        first, last = _bytes_of(source)
        if any(begin < last and first < end for begin, end in pending):
            self.violations.append("a buffer is read while weights are still on their way into it")
        target.copy_(source)

    def is_done(self, fence: LazyFence | None) -> bool:
        with self._lock:
            return fence is None or not self._pending or self._pending[0][0] > fence.copy

    def synchronize(self, fence: LazyFence | None) -> None:
        if fence is None:
            return
        with self._lock, torch.no_grad():
            while self._pending and self._pending[0][0] <= fence.copy:
                _, target, source = self._pending.popleft()
                target.copy_(source)
                self.num_lazy += 1

    def compute_waits_for(self, fence: LazyFence | None) -> None:
        thread = threading.get_ident()
        if thread == self._trains_in:
            self.synchronize(fence)
        elif fence is not None:
            self._waited[thread] = max(fence.copy, self._waited.get(thread, -1))
