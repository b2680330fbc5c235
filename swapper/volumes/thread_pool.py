"""Threads for work on files that also has to be done while the interpreter ends.

``ThreadPoolExecutor`` refuses work then, and has a lock that all executors of a process share: an interrupt inside of it
can leave that taken, and the next save waits for ever. Here what the caller does takes locks for one step only; see
[Note: bells] in `swapper.sync.bell`.
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
    """A context manager: in its end, all that was given to it is done."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: _Jobs = queue.SimpleQueue()
        self._given: deque[Future[Any]] = deque()
        """What may not be over."""
        self._num_begun = 0
        """Of threads. An interrupt may leave one out."""

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Do ``function(*args)``, at once if no thread can be had, as when the interpreter ends."""
        future: Future[T] = Future()
        job = partial(fulfil, future, function, *args)
        if self._num_begun < self._num_threads:
            try:
                _thread.start_new_thread(_serve, (self._jobs,))
                self._num_begun += 1
            except RuntimeError:
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
        """Return when all has been done. May be called again."""
        while self._given:
            self._given[0].exception()
            self._given.popleft()
        self._jobs.put(None)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps nothing alive
    jobs.put(None)  # for the next one
