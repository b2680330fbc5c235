"""Two pools of worker threads, one for reads and one for writes."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from functools import partial

from swapper.backend import Direction, IORequest
from swapper.sync.callbacks import call_back
from swapper.sync.lifetimes import EXIT_SECONDS, Roll, when_gone
from swapper.sync.limits import start_threads
from swapper.sync.patience import join_all
from swapper.uncopyable import Uncopyable

Transfer = Callable[[IORequest], int]
"""Carries out one request; returns the number of bytes transferred, or raises ``OSError``."""
RequestQueue = queue.SimpleQueue[IORequest | None]


def _serve(requests: RequestQueue, transfer: Transfer) -> None:
    # A plain function and not a method: a running thread must not keep the pool alive, or nobody would ever stop it.
    while True:
        request = requests.get()
        if request is None:
            return
        error: OSError | None = None
        transferred = 0
        try:
            transferred = transfer(request)
        except OSError as os_error:
            # The traceback's frames refer to the request and so to the user's memory; the number and text are enough.
            error = os_error.with_traceback(None)
        except BaseException as other:
            error = OSError(None, f"{type(other).__name__}: {other}")
        call_back(partial(request.complete, transferred, error), "completing a transfer")
        # An idle worker must not keep the last buffer alive.
        del request, error


def _stop(queues: tuple[RequestQueue, ...], num_threads: int) -> None:
    for requests in queues:
        for _ in range(num_threads):
            requests.put(None)


# A thread that is inside native code when the interpreter goes away is ended there, which C++ code answers with abort.
_open_pools: Roll[WorkerPool] = Roll(at_exit=lambda pool: pool.close(EXIT_SECONDS))


class WorkerPool(Uncopyable):
    """Knows threads and the queues they take requests from; must not know what a transfer does.

    Reads and writes have workers of their own: were they shared, slow writes could occupy all of them while the drive
    sits idle in the other direction.
    """

    def __init__(self, name: str, transfer: Transfer, num_threads: int) -> None:
        self.num_threads = num_threads
        self._queues: tuple[RequestQueue, RequestQueue] = (queue.SimpleQueue(), queue.SimpleQueue())
        self.threads = [
            threading.Thread(
                target=_serve,
                args=(self._queues[direction], transfer),
                name=f"swapper-{name}-{direction.name.lower()}-{index}",
                daemon=True,
            )
            for direction in Direction
            for index in range(num_threads)
        ]
        when_gone(self, _stop, self._queues, num_threads)
        self._is_closed = False
        start_threads(*self.threads, stop=self.stop)
        _open_pools.add(self)

    def submit(self, request: IORequest) -> None:
        """Hand a request to the next idle worker of its direction."""
        if self._is_closed:  # by the end of the process: whoever still waits must not wait for his deadline
            request.complete(0, OSError(errno.ESHUTDOWN, "the worker threads have ended"))
        else:
            self._queues[request.direction].put(request)

    def stop(self) -> None:
        """Take nothing more, and have the workers end after what is queued. Idempotent."""
        self._is_closed = True
        _stop(self._queues, self.num_threads)  # not by the finalizer, which an interrupt would use up
        _open_pools.discard(self)

    def close(self, timeout_seconds: float) -> bool:
        """Stop the workers after what is queued; return whether all of them ended in time."""
        self.stop()
        return join_all(self.threads, timeout_seconds)
