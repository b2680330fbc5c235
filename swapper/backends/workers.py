"""Worker threads that wait in the kernel, or copy memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from swapper.backend import Direction
from swapper.sync.callbacks import log_raised
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects, call_when_collected
from swapper.sync.limits import join_all, start_threads
from swapper.uncopyable import Uncopyable, closed_unless_made

STOP_SECONDS = 10.0  # how long a constructor that failed waits for the threads it has started
Job = Callable[[], object]
_Jobs = queue.SimpleQueue[Job | None]


def _serve(jobs: _Jobs) -> None:
    # A plain function and not a method: a running thread must not keep its owner alive, or nobody would ever stop it.
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:
            log_raised(error, "a worker's job")
        del job  # an idle worker must not keep the last buffer alive


def _stop(jobs: _Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)  # behind all queued jobs; each None ends one thread


# A thread that is inside native code when the interpreter goes away is ended there, which C++ code answers with abort.
_open: LiveObjects[Workers] = LiveObjects(at_exit=lambda workers: stop_workers([workers], EXIT_SECONDS))


class Workers(Uncopyable):
    """Daemon threads that do jobs in the order in which they come."""

    def __init__(self, name: str, num_threads: int) -> None:
        # Unbounded: the scheduler limits what is at a backend (`TransferQueue.limit`). A finalizer may call
        # SimpleQueue.put in the middle of another put.
        self.jobs: _Jobs = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=_serve, args=(self.jobs,), name=f"swapper-{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        call_when_collected(self, _stop, self.jobs, num_threads)
        self.is_closed = False
        start_threads(*self.threads, stop=self.stop)
        _open.add(self)

    def submit(self, job: Job) -> bool:
        """Have the next idle thread do the job; return false if the threads have been stopped."""
        if not self.is_closed:
            self.jobs.put(job)
        return not self.is_closed

    def stop(self) -> None:
        """Take nothing more, and have the threads end after what is queued. Idempotent."""
        self.is_closed = True
        _stop(self.jobs, len(self.threads))  # not by the finalizer, which an interrupt would use up
        _open.discard(self)


def start_workers(name: str, num_threads: int, num_files: int = 1) -> list[Workers]:
    """Return workers for each file and direction: those of a direction of file ``n`` are at ``2 * n + direction``."""
    # Slow writes, or a slow or hung drive, must not occupy the threads of reads, or of another drive.
    started: list[Workers] = []
    with closed_unless_made(stop_workers, started, STOP_SECONDS):
        for column in range(num_files):
            file = name if num_files == 1 else f"{name}-{column}"
            for direction in Direction:
                started.append(Workers(f"{file}-{direction.name.lower()}", num_threads))
    return started


def stop_workers(all_workers: Sequence[Workers], timeout_seconds: float) -> bool:
    """Stop workers after what is queued; return whether all of their threads ended in time."""
    for workers in all_workers:
        workers.stop()  # all of them before waiting for one, which may hang
    return join_all([thread for workers in all_workers for thread in workers.threads], timeout_seconds)
