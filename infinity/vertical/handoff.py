"""Functions in a thread of their own, which stop wherever they say so and go on when the training thread says so.

[Note: hand-off] Each micro-batch runs the user's forward in a thread of its own, because only a thread can be stopped in the
midst of somebody else's function. The training thread resumes one of them at a time, and waits until that pauses or ends. So
nothing ever runs beside anything else, and neither the model nor the engine needs a lock.

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
from infinity.threads.openmp import release_workers
from swapper.sync.limits import start_threads

_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 5.0
"""How long to wait for a thread that was told to end, before it is left to itself."""


class Abandoned(BaseException):
    """Raised inside a micro-batch's thread when nobody waits for it any more.

    Not an `Exception`, so that the model's own ``except`` clauses let it pass.
    """


class MicroBatchThread:
    """Runs one function after another, only between a `resume` and the moment when the function pauses or ends.

    It is kept from step to step, with what kernels keep per thread: buffers, compiled code.
    """

    def __init__(self, index: int) -> None:
        # Each is held but for the moment in which it hands over.
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_running = False
        self._is_abandoned = False
        self.is_over = True
        """Whether no function has begun that has not ended."""
        # When the interpreter ends, one that waits does no harm.
        self._thread = threading.Thread(target=self._serve, name=f"infinity-micro-batch-{index}", daemon=True)

    # ---------------------------------------------------------------------------------------------- training thread

    def begin(self, function: Callable[[], object]) -> None:
        """Have ``function`` run at the first `resume`, in a copy of the caller's context, with its number of threads.

        Raises:
            LimitError: the system gives no more threads.
        """
        if self._thread.ident is None:
            start_threads(self._thread)
        context, num_threads, flushes = contextvars.copy_context(), torch.get_num_threads(), flushes_denormals()

        def job() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)  # is kept per thread
            flush_denormals(flushes)
            context.run(function)

        self._job = job
        self.is_over = False

    def resume(self) -> None:
        """Let the function run on until it pauses or ends. Raises what it has raised."""
        self._is_running = True
        self._go.release()
        while not self._stopped.acquire(timeout=_POLL_SECONDS):  # so that a KeyboardInterrupt gets through
            pass
        self._is_running = False
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame

    def forbid(self) -> None:
        """The function ends with `Abandoned` when it pauses next, and the thread with it."""
        self._is_abandoned = True

    def end(self) -> None:
        """End the thread, in the midst of a function as well if that has paused. Waits for nothing."""
        self._is_abandoned = True
        with contextlib.suppress(RuntimeError):  # it runs, and has not paused a moment ago
            self._go.release()

    def abandon(self) -> None:
        """End the thread, and wait until it has ended, though not for ever."""
        self._is_abandoned = True
        if self._is_running and self._thread.ident is not None:  # the training thread was interrupted while it waited
            identity = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Abandoned))
        self.end()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_SECONDS)

    # ------------------------------------------------------------------------------------------------ the other thread

    def pause(self) -> None:
        """Wait for the next `resume`.

        Raises:
            Abandoned: there will be none.
        """
        release_workers()  # see [Note: one pool] in infinity.threads.openmp
        if not self._is_abandoned:
            self._stopped.release()
            self._go.acquire()
        if self._is_abandoned:
            raise Abandoned

    def _serve(self) -> None:
        with contextlib.suppress(Abandoned):  # between two lines of this function
            while not self._is_abandoned:
                self._go.acquire()
                job, self._job = self._job, None
                if job is None or self._is_abandoned:
                    return
                try:
                    job()
                except BaseException as error:
                    self._error = error
                del job  # it holds the model
                release_workers()
                self.is_over = True
                with contextlib.suppress(RuntimeError):  # nobody waits, if it was abandoned
                    self._stopped.release()
