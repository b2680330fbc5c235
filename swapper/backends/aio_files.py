"""Asynchronous I/O through aiofiles: for network file systems, and those without O_DIRECT.

aiofiles cannot open scratch files, which have no name, and it has no positional reads and writes. But its ``wrap``
makes a coroutine of any blocking function. Here that function is `FileTransfer`, as in `ThreadsBackend`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import aiofiles.os

from swapper.backend import Direction, IORequest, ended
from swapper.backends.file_transfer import FileTransfer
from swapper.backends.volume_backend import STOP_SECONDS, VolumeBackend
from swapper.backends.workers import Workers
from swapper.sync.callbacks import fulfil
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects, call_when_collected
from swapper.sync.limits import limits_in_words, start_threads
from swapper.sync.timeouts import join_all
from swapper.volumes.volume import FileRange, Volume

_T = TypeVar("_T")


class _Executor(concurrent.futures.Executor):
    """Workers behind the interface that asyncio expects."""

    # Not a ThreadPoolExecutor: Python joins its threads at exit, so one that hangs in the kernel would keep the
    # process.

    def __init__(self, name: str, num_threads: int) -> None:
        self.workers = Workers(name, num_threads)

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[_T]:
        """Have the next idle thread call the function."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self.workers.submit(partial(fulfil, future, partial(function, *args, **kwargs)))
        return future


class _Loop:
    """An event loop, the thread it runs on, and the executors that wait in the kernel for it."""

    # It has no reference to its backend: the thread would keep that alive, and its finalizer would never stop the loop.
    def __init__(self, transfer: FileTransfer, num_files: int, num_threads: int) -> None:
        self._transfer = aiofiles.os.wrap(transfer.__call__)
        with limits_in_words():
            self._loop = _new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself refers to its tasks only weakly
        # One for each file and direction: slow writes, or a slow drive, must not occupy the threads of others.
        self._executors: dict[tuple[int, Direction], _Executor] = {}
        self._thread = threading.Thread(target=self._run, name="swapper-aiofiles-loop", daemon=True)
        try:
            for column, direction in itertools.product(range(num_files), Direction):
                name = f"aiofiles-{column}-{direction.name.lower()}"
                self._executors[column, direction] = _Executor(name, num_threads)
            start_threads(self._thread)
        except BaseException:
            self._end()
            for thread in self.threads[1:]:  # the first is the loop's own, which has not started
                thread.join(STOP_SECONDS)
            raise

    @property
    def threads(self) -> list[threading.Thread]:
        """All threads, the loop's own first."""
        return [self._thread, *(thread for executor in self._executors.values() for thread in executor.workers.threads)]

    def submit(self, request: IORequest, file_ranges: list[FileRange]) -> None:
        """Start a transfer, from any thread."""
        # _start makes the coroutine on the loop's thread. Made here, it would never be awaited if the loop had just
        # ended, and Python warns of that.
        self._loop.call_soon_threadsafe(self._start, request, file_ranges)

    def stop(self) -> None:
        """End the loop and all threads after what was submitted."""
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.close()
        for executor in self._executors.values():
            executor.workers.stop()

    def _start(self, request: IORequest, file_ranges: list[FileRange]) -> None:
        task = self._loop.create_task(self._serve(request, file_ranges))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._loop.stop()

    async def _serve(self, request: IORequest, file_ranges: list[FileRange]) -> None:
        outcome: list[Any] = []
        # boundary_bytes is the stripe, so that a request never has ranges in two files.
        executor = self._executors[file_ranges[0][0], request.direction]
        await self._transfer(request, file_ranges, lambda *end: outcome.append(end), loop=self._loop, executor=executor)
        request.complete(*outcome[0])


def _new_event_loop() -> asyncio.AbstractEventLoop:
    # This opens as many files as a loop does, and closes them: at the limit on open files it raises here. asyncio would
    # leave a half made loop to the garbage collector, which warns of it.
    with select.epoll():
        for end in socket.socketpair():
            end.close()
    return asyncio.new_event_loop()


# Weak references. A backend that nobody closed is stopped when the process ends.
_open_backends: LiveObjects[AiofilesBackend] = LiveObjects(at_exit=lambda backend: backend.stop(EXIT_SECONDS))


class AiofilesBackend(VolumeBackend):
    """A volume and the event loop that transfers its bytes.

    Args:
        volume: Where the bytes go; closed together with the backend.
        num_threads: Threads that wait in the kernel, for each direction and file.
    """

    def __init__(self, volume: Volume, num_threads: int = 4) -> None:
        super().__init__(volume)
        self.num_threads = num_threads
        self.concurrency = num_threads * len(volume.files)
        self._lock = threading.RLock()  # guards _is_closed: no request may reach the loop behind its stop
        self._is_closed = False
        self._loop = _Loop(self._transfer, len(volume.files), num_threads)
        self._stop_once = call_when_collected(self, self._loop.stop)
        _open_backends.add(self)  # to be stopped when the process ends, unless `close` comes first

    def describe(self) -> str:
        """Return one line for logs."""
        return (
            f"aiofiles: {self.volume.describe()}, {self.num_threads} threads for reads and {self.num_threads} for writes"
            f"{' of each file' if len(self.volume.files) > 1 else ''}"
        )

    def submit(self, request: IORequest) -> None:
        """Hand the request to the event loop."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._loop.submit(request, self.volume.file_ranges(request.offset, len(request.memory)))
        if is_closed:  # outside of the lock: completion calls back into the scheduler, which takes its own
            request.complete(0, ended("the event loop has"))

    def stop(self, timeout_seconds: float) -> bool:
        """Take nothing more and end all threads after what was submitted; return whether all of them did in time."""
        with self._lock:
            self._is_closed = True
        self._stop_once()
        _open_backends.discard(self)
        return join_all(self._loop.threads, timeout_seconds)
