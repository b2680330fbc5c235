"""Threads for work on files that also has to be done while the interpreter ends.

[Note: pools and interrupts] A KeyboardInterrupt inside of ``ThreadPoolExecutor.submit`` can leave a lock of it taken, even the
one that all executors of a process share: then the next save waits for ever, and so does the end of the interpreter. Here what
the caller does takes locks for one step only; see [Note: bells] in `swapper.sync.bell`.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from swapper.sync.bell import Latch
from swapper.uncopyable import Closable

T = TypeVar("T")


class Work(Generic[T]):
    """Something that a thread does for somebody."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._is_over = Latch()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it. Called once."""
        try:
            if self._function is not None:
                self._result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._function = None  # what it refers to may be memory
            self._is_over.set()

    def is_over(self) -> bool:
        """Whether it has been done, or has failed."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Return when it is over."""
        self._is_over.wait()

    def result(self) -> T:
        """Return what it returned, or raise what it raised, when it is over."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback has this frame, and would keep what failed alive
        return self._result


class ThreadPool(Closable):
    """A context manager: in its end, all that was given to it is done."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._works: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._given: deque[Work[Any]] = deque()
        """What may not be over."""
        self._num_begun = 0
        """Of threads. An interrupt may leave one out."""

    def submit(self, function: Callable[..., T], *args: Any) -> Work[T]:
        """Do ``function(*args)``, at once if no thread can be had, as when the interpreter ends."""
        work = Work(functools.partial(function, *args))
        self._works.put(work)
        while self._given and self._given[0].is_over():
            self._given.popleft()
        self._given.append(work)
        if self._num_begun < self._num_threads:
            try:
                _thread.start_new_thread(_serve, (self._works,))
                self._num_begun += 1
            except RuntimeError:
                if not self._num_begun:
                    self._work_here()
        return work

    def _work_here(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (work := self._works.get_nowait()) is not None:
                work.run()

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """What ``function`` returns for each item; raises the first error."""
        return [work.result() for work in [self.submit(function, item) for item in items]]

    def close(self) -> None:
        """Return when all has been done. May be called again."""
        if not self._num_begun:
            self._work_here()
        while self._given:
            self._given[0].wait()
            self._given.popleft()
        self._works.put(None)


def _serve(works: queue.SimpleQueue[Work[Any] | None]) -> None:
    while (work := works.get()) is not None:
        work.run()
        del work  # an idle thread keeps nothing alive
    works.put(None)  # for the next one
