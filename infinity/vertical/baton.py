"""Threads of which one runs at a time: whoever holds the baton.

Knows threads and messages; must not know models. [Note: baton] Each micro-batch runs the user's forward in a thread of
its own (a `Lane`), because only a thread can be stopped in the middle of somebody else's function. The training thread
gives the baton to one lane at a time and waits until the lane parks; so nothing ever runs beside anything else, and
neither the model nor the engine needs a lock. A lane can park with an `Errand`: what takes long is computed fastest by a
thread that keeps its workers (see [Note: one pool] in ``infinity.threads.openmp``), and one thread can.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from infinity.threads.denormals import flush_denormals, flushes_denormals
from infinity.threads.openmp import release_workers
from swapper.sync.limits import start_threads

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
"""How long to wait for a lane that was told to stop, before it is left to itself."""


class Abandoned(BaseException):
    """Raised inside a micro-batch's thread when nobody waits for it any more.

    Not an `Exception`, so that the model's own ``except`` clauses let it pass.
    """


class _Mailbox:
    """What a lane's thread and the training thread share."""

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.parked = threading.Lock()
        self.go.acquire()
        self.parked.acquire()
        self.job: Callable[[], Any] | None = None
        self.message: Any = None
        self.is_abandoned = False
        self.is_lost = False


class Finished:
    """A lane's message: its function has returned ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Failed:
    """A lane's message: its function has raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Errand:
    """A lane's message: something that the training thread shall do for it before it resumes the lane."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._outcome: Finished | Failed | None = None

    def run(self) -> None:
        """Call the function, on the training thread. What it raises is the lane's, unless it is to end the program."""
        function, self._function = self._function, None
        if function is None:
            raise RuntimeError("an errand is run once")
        try:
            self._outcome = Finished(function())
        except (Exception, Abandoned) as error:
            self._outcome = Failed(error)

    def take_result(self) -> Any:
        """What the function has returned, or raise what it has raised; nothing of it stays here."""
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Failed):
            try:
                raise outcome.error
            finally:
                del outcome  # it refers to this frame
        return outcome.value if outcome is not None else None


class Lane:
    """A function in a thread of its own, which runs only between a `resume` and the moment when it parks or ends."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._mailbox = _Mailbox()
        self._is_running = False
        self.is_busy = False
        """Whether a function was begun and has not ended."""
        name = f"infinity-micro-batch-{index}"
        self.thread = threading.Thread(target=_serve, args=(self._mailbox,), name=name, daemon=True)

    # ---------------------------------------------------------------------------------------------- training thread

    def begin(self, function: Callable[[], Any]) -> None:
        """Have ``function`` run at the first `resume`, in a copy of the caller's context."""
        context, num_threads = contextvars.copy_context(), torch.get_num_threads()
        is_flushing = flushes_denormals()

        def job() -> Finished | Failed:
            try:
                if torch.get_num_threads() != num_threads:
                    torch.set_num_threads(num_threads)  # is kept per thread
                flush_denormals(is_flushing)
                return Finished(context.run(function))
            except BaseException as error:
                return Failed(error)

        self._mailbox.job = job
        self._mailbox.is_abandoned = False
        self.is_busy = True

    def resume(self) -> Any:
        """Let the function run on until it parks or ends.

        Returns:
            What it parked with, a `Finished`, or a `Failed`.
        """
        mailbox = self._mailbox
        self._is_running = True
        mailbox.go.release()
        while not mailbox.parked.acquire(timeout=_POLL_SECONDS):  # so that a KeyboardInterrupt gets through
            pass
        self._is_running = False
        message, mailbox.message = mailbox.message, None
        if isinstance(message, Finished | Failed):
            self.is_busy = False
        return message

    def forbid(self) -> None:
        """The function ends with `Abandoned` as soon as it would go on after parking."""
        self._mailbox.is_abandoned = True

    def abandon(self) -> bool:
        """Have the function end with `Abandoned`. Returns whether the lane can be used again."""
        mailbox = self._mailbox
        mailbox.is_abandoned = True
        if self._is_running:  # the training thread was interrupted while it waited
            mailbox.is_lost = True
            if self.thread.ident is not None:
                identity = ctypes.c_ulong(self.thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Abandoned))
            with contextlib.suppress(RuntimeError):
                mailbox.go.release()  # it may have parked a moment ago
            self.thread.join(_PATIENCE_SECONDS)
            return False
        if mailbox.job is not None:  # never resumed
            mailbox.job = None
        elif self.is_busy:
            while not isinstance(mailbox.message, Finished | Failed):  # it may catch the exception, and go on
                mailbox.go.release()
                if not mailbox.parked.acquire(timeout=_PATIENCE_SECONDS):
                    mailbox.is_lost = True
                    return False
        mailbox.message = None
        self.is_busy = False
        return True

    def stop(self) -> None:
        """Have the thread end, in the midst of a function as well if that has parked. Waits for nothing."""
        self._mailbox.is_abandoned = self._mailbox.is_lost = True
        self._let_end()

    def close(self) -> None:
        """End the thread. Nothing may be running in it."""
        if not self._mailbox.is_lost:
            self._let_end()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(_PATIENCE_SECONDS)

    def _let_end(self) -> None:
        self._mailbox.job = None
        with contextlib.suppress(RuntimeError):  # it runs already
            self._mailbox.go.release()

    # ------------------------------------------------------------------------------------------------ inside the lane

    def park(self, message: Any) -> None:
        """Give the baton back and wait for the next `resume`.

        Raises:
            Abandoned: nobody will wait for this lane any more.
        """
        mailbox = self._mailbox
        release_workers()  # see [Note: one pool] in infinity.threads.openmp
        if not mailbox.is_abandoned:
            mailbox.message = message
            mailbox.parked.release()
            mailbox.go.acquire()
        if mailbox.is_abandoned:
            raise Abandoned


def _serve(mailbox: _Mailbox) -> None:
    """The thread: one job after the other. It holds nothing but the mailbox, so an engine that is dropped can be freed."""
    with contextlib.suppress(Abandoned):  # of a lane that is lost, between two lines of this function
        while True:
            mailbox.go.acquire()
            job, mailbox.job = mailbox.job, None
            if job is None:
                return
            mailbox.message = job()
            del job
            release_workers()
            if mailbox.is_lost:
                return
            mailbox.parked.release()


class Lanes:
    """As many lanes as there are micro-batches, kept from step to step."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._pid = os.getpid()
        self._is_asked_to_close = False
        # Lanes that wait for the baton do no harm when the interpreter ends.
        weakref.finalize(self, _stop_all, self._lanes).atexit = False

    def take(self, num_lanes: int) -> list[Lane]:
        """``num_lanes`` idle lanes."""
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._lanes.clear()
            self._pid = os.getpid()
        while len(self._lanes) < num_lanes:
            self._lanes.append(Lane(len(self._lanes)))
        taken = self._lanes[:num_lanes]
        for lane in taken:
            if lane.thread.ident is None:
                start_threads(lane.thread)
        return taken

    def abandon(self) -> None:
        """End what still runs in any of them. A lane that does not end in time is replaced."""
        self._lanes[:] = [lane for lane in self._lanes if lane.abandon()]

    def close(self) -> None:
        """End all threads; if one of them calls, when it has ended (see `close_if_asked`)."""
        if any(lane.thread is threading.current_thread() for lane in self._lanes):
            for lane in self._lanes:
                lane.forbid()
            self._is_asked_to_close = True
            return
        self.abandon()
        while self._lanes:
            self._lanes[-1].close()
            del self._lanes[-1]

    def close_if_asked(self) -> None:
        """The training thread is back: do what `close` could not."""
        if self._is_asked_to_close:
            self.close()


def _stop_all(lanes: list[Lane]) -> None:
    """The owner is garbage. Takes no lock and waits for nothing: see [Note: reaping] in ``infinity.engine.shutdown``."""
    for lane in lanes:
        lane.stop()
