"""Threads for work on files, also while the interpreter ends.

``ThreadPoolExecutor`` refuses work at that time. All executors of a process also share a lock, which an interrupt can
leave taken: then the next save waits forever. Here the caller takes no lock for longer than a step; see [Note: bells]
in `swapper.sync.bell`.
"""

from __future__ import annotations

import _thread
import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from swapper.sync.callbacks import fulfil
from swapper.uncopyable import Closable

T = TypeVar("T")
_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class ThreadPool(Closable):
    """A context manager whose end waits until all submitted work is done."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: _Jobs = queue.SimpleQueue()
        self._given: deque[Future[Any]] = deque()  # from the first one on that may not be over; close() waits for them
        self._num_begun = 0  # threads started; an interrupt between start and count makes it one too few

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Do ``function(*args)``, at once if no thread can be had, as when the interpreter ends."""
        future: Future[T] = Future()
        job = partial(fulfil, future, function, *args)
        if self._num_begun < self._num_threads:
            try:
                # Not threading.Thread: its start() waits on an Event, see [Note: bells].
                _thread.start_new_thread(_serve, (self._jobs,))
                self._num_begun += 1
            except RuntimeError:  # the interpreter ends, or there are too many threads
                if not self._num_begun:
                    job()
                    return future
        self._jobs.put(job)
        while self._given and self._given[0].done():
            self._given.popleft()
        self._given.append(future)
        return future

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """What ``function`` returns for each item; raises the first error."""
        return [future.result() for future in [self.submit(function, item) for item in items]]

    def close(self) -> None:
        """Wait until all work is done. Idempotent."""
        while self._given:  # removed only afterwards: a close that an interrupt cuts off can be repeated
            self._given[0].exception()
            self._given.popleft()
        self._jobs.put(None)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps nothing alive
    jobs.put(None)  # for the next thread: one None ends them all
