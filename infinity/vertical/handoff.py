"""Threads that run a function step by step: it pauses itself, and the training thread resumes it. Coroutines by
threads.

[Note: hand-off] Each micro-batch runs the user's forward in a thread of its own, because only a thread can be paused
inside somebody else's function. The training thread resumes one of them at a time, and waits until it pauses or ends.
So only one thread ever runs, and neither the model nor the engine needs a lock.

    training thread     resume() ....waits.... resume() ....waits.... resume()
    micro-batch 0                 runs, pause()                                 runs, ...
    micro-batch 1                                        runs, pause()
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable

import torch

from infinity.threads.denormals import flush_denormals, flushes_denormals
from infinity.threads.openmp import end_openmp_workers
from swapper.sync.limits import start_threads

# How often the waiting training thread returns to Python code, where a KeyboardInterrupt is raised.
_POLL_SECONDS = 1.0
# How long to wait for a thread to end. It may be inside a kernel that takes longer: then it is left to itself.
_TIMEOUT_SECONDS = 5.0


class Abandoned(BaseException):
    """Raised inside a micro-batch's thread to end it. No `Exception`, so that the model's ``except`` clauses let it
    pass."""


class MicroBatchThread:
    """Runs one function after another, each only between a `resume` and its next pause or its end.

    It is kept from step to step, because kernels keep buffers and compiled code per thread.
    """

    def __init__(self, index: int) -> None:
        # Two locks as signals, both locked at rest. `resume` unlocks `_go` and waits to lock `_stopped`; `pause`
        # unlocks `_stopped` and waits to lock `_go`. A plain Lock may be unlocked by another thread than the one that
        # locked it.
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_running = False
        self._is_abandoned = False
        self.is_over = True
        """Whether the last function has ended."""
        # A daemon: the interpreter does not wait at exit for a thread that is paused.
        self._thread = threading.Thread(target=self._serve, name=f"infinity-micro-batch-{index}", daemon=True)

    # ---------------------------------------------------------------------------------------------- training thread

    def begin(self, function: Callable[[], object]) -> None:
        """Prepare ``function`` for the first `resume`, with the caller's context variables and thread settings.

        Raises:
            LimitError: the system gives no more threads.
        """
        if self._thread.ident is None:
            start_threads(self._thread)
        # Both are kept per thread, by OpenMP and by the processor's control register. With other values, results would
        # have other bits.
        context, num_threads, flushes = contextvars.copy_context(), torch.get_num_threads(), flushes_denormals()

        def job() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            flush_denormals(flushes)
            context.run(function)

        self._job = job
        self.is_over = False

    def resume(self) -> None:
        """Let the function run until it pauses or ends, see [Note: hand-off]. Raises the function's exception."""
        self._is_running = True
        self._go.release()
        while not self._stopped.acquire(timeout=_POLL_SECONDS):
            pass
        self._is_running = False
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle that would keep tensors alive

    def forbid(self) -> None:
        """Let the function end with `Abandoned` at its next pause, and the thread with it."""
        self._is_abandoned = True

    def end(self) -> None:
        """End the thread, also while its function is paused. Waits for nothing."""
        self._is_abandoned = True
        with contextlib.suppress(RuntimeError):  # raised for an unlocked lock: the thread has just been resumed
            self._go.release()

    def abandon(self) -> None:
        """End the thread, and wait for that at most ``_TIMEOUT_SECONDS``."""
        self._is_abandoned = True
        # An interrupt has reached the training thread inside `resume`, while the function runs. The exception is raised
        # in that thread at its next instruction in Python.
        if self._is_running and self._thread.ident is not None:
            identity = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Abandoned))
        self.end()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_SECONDS)

    # ------------------------------------------------------------------------------------------------ the other thread

    def pause(self) -> None:
        """Wait for the next `resume`, see [Note: hand-off].

        Raises:
            Abandoned: there will be none.
        """
        end_openmp_workers()  # while this thread waits, they would spin: see [Note: one pool] in infinity.threads.openmp
        if not self._is_abandoned:
            self._stopped.release()
            self._go.acquire()
        if self._is_abandoned:  # looked at twice: it may have been set before the pause, or during it
            raise Abandoned

    def _serve(self) -> None:
        with contextlib.suppress(Abandoned):  # `abandon` may raise it between any two lines here
            while not self._is_abandoned:
                self._go.acquire()
                job, self._job = self._job, None
                if job is None or self._is_abandoned:
                    return
                try:
                    job()
                except BaseException as error:
                    self._error = error
                del job  # the thread waits in `acquire` next, and would keep the model alive
                end_openmp_workers()
                self.is_over = True  # before the release: `resume` returns then, and its caller reads this
                with contextlib.suppress(RuntimeError):  # already unlocked, if the thread was abandoned
                    self._stopped.release()
