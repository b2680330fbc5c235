"""Asynchronous I/O through aiofiles: for network file systems, and those without O_DIRECT.

aiofiles cannot open scratch files, which have no name, and it has no positional reads and writes. But its ``wrap``
makes a coroutine of any blocking function. Here that function is `VolumeBackend.transfer`, as in `ThreadsBackend`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import aiofiles.os

from swapper.backend import IORequest, as_os_error, ended
from swapper.backends.volume_backend import VolumeBackend
from swapper.backends.workers import STOP_SECONDS, Workers, start_workers, stop_workers
from swapper.sync.callbacks import fulfil
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects, call_when_collected
from swapper.sync.limits import join_all, limits_in_words, start_threads
from swapper.uncopyable import closed_unless_made
from swapper.volumes.volume import FileRange, Volume

_T = TypeVar("_T")
_Inbox = asyncio.Queue[tuple[Any, ...] | None]  # arguments of _serve(); None ends the loop


class _Executor(concurrent.futures.Executor):
    """Workers behind the interface that asyncio expects."""

    # Not a ThreadPoolExecutor: Python joins its threads at exit, so one that hangs in the kernel would keep the
    # process.

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[_T]:
        """Have the next idle thread call the function."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._workers.submit(partial(fulfil, future, partial(function, *args, **kwargs)))
        return future


def _new_event_loop() -> asyncio.AbstractEventLoop:
    # This opens as many files as a loop does, and closes them: at the limit on open files it raises here. asyncio would
    # leave a half made loop to the garbage collector, which warns of it.
    with select.epoll():
        for end in socket.socketpair():
            end.close()
    return asyncio.new_event_loop()


# An idle loop has no reference to the backend: its thread would keep that alive, and its finalizer would never stop the
# loop.


def _run(loop: asyncio.AbstractEventLoop, inbox: _Inbox, all_workers: list[Workers]) -> None:
    try:
        loop.run_until_complete(_serve_all(inbox))
    finally:
        loop.close()
        for workers in all_workers:
            workers.stop()


async def _serve_all(inbox: _Inbox) -> None:
    async with asyncio.TaskGroup() as tasks:  # its end waits for all of them
        while (arguments := await inbox.get()) is not None:
            tasks.create_task(_serve(*arguments))
            del arguments  # an idle loop must not keep the last request alive


async def _serve(transfer: Any, request: IORequest, file_ranges: list[FileRange], executor: _Executor) -> None:
    outcome: list[Any] = []
    try:
        await transfer(request, file_ranges, lambda *end: outcome.append(end), executor=executor)
    except Exception as error:  # else the group would cancel all other transfers
        outcome.append((0, as_os_error(error)))
    request.complete(*outcome[0])


# Weak references. A backend that nobody closed is stopped when the process ends.
_open_backends: LiveObjects[AiofilesBackend] = LiveObjects(at_exit=lambda backend: backend.stop(EXIT_SECONDS))


class AiofilesBackend(VolumeBackend):
    """A volume and the event loop that transfers its bytes.

    Args:
        volume: Where the bytes go; closed together with the backend.
        num_threads: Threads that wait in the kernel, for each direction and file.
    """

    def __init__(self, volume: Volume, num_threads: int = 4) -> None:
        super().__init__(volume, num_threads)
        self.concurrency = num_threads * len(volume.files)
        self._lock = threading.RLock()  # guards _is_closed: no request may reach the loop behind its stop
        self._is_closed = False
        self._transfer = aiofiles.os.wrap(type(self).transfer)
        self._inbox: _Inbox = asyncio.Queue()
        all_workers = start_workers("aiofiles", num_threads, len(volume.files))
        self._executors = [_Executor(workers) for workers in all_workers]
        with limits_in_words(), closed_unless_made(stop_workers, all_workers, STOP_SECONDS):
            self._loop = _new_event_loop()
            thread = threading.Thread(
                target=_run, args=(self._loop, self._inbox, all_workers), name="swapper-aiofiles-loop", daemon=True
            )
            start_threads(thread, stop=self._loop.close)
        self._threads = [thread, *(each for workers in all_workers for each in workers.threads)]
        # None ends the loop and all threads, after what was submitted.
        self._stop_once = call_when_collected(self, self._loop.call_soon_threadsafe, self._inbox.put_nowait, None)
        _open_backends.add(self)  # to be stopped when the process ends, unless `close` comes first

    def describe(self) -> str:
        """Return one line for logs."""
        return f"aiofiles: {self.describe_threads()}"

    def submit(self, request: IORequest) -> None:
        """Hand the request to the event loop."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                file_ranges = self.volume.file_ranges(request.offset, len(request.memory))
                # boundary_bytes is the stripe, so that a request never has ranges in two files.
                executor = self._executors[2 * file_ranges[0][0] + request.direction]
                arguments = (partial(self._transfer, self), request, file_ranges, executor)
                self._loop.call_soon_threadsafe(self._inbox.put_nowait, arguments)
        if is_closed:  # outside of the lock: completion calls back into the scheduler, which takes its own
            request.complete(0, ended("the event loop has"))

    def stop(self, timeout_seconds: float) -> bool:
        """Take nothing more and end all threads after what was submitted; return whether all of them did in time."""
        with self._lock:
            self._is_closed = True
        self._stop_once()
        _open_backends.discard(self)
        return join_all(self._threads, timeout_seconds)
