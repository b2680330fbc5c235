"""Orders reads and writes, bounds what is in flight, and remembers every error until somebody has seen it.

[Note: the usual case is cheap]
Dependencies and deadline of an operation are fixed once, at its submission. It reaches the backend in as few
transfers as keep that busy. Python touches it once more, when the last transfer ends. Code for retries and errors
runs only when they occur.

[Note: hung transfers]
A transfer that misses its deadline fails its operation with a ``StallError``, but the kernel may still move the bytes
later. So the stalled operation stays active until the backend completes it. Meanwhile, operations on the same bytes
fail at once. Its memory and the extent's space are not reused (see [Note: whose memory it is] in
``swapper.memory.held``).

[Note: signals]
If KeyboardInterrupt came while a transfer is submitted, nobody could tell whether the backend has it and its memory. So
state changes are `uninterrupted`, and waits are not (see [Note: interrupts] in ``swapper.sync.interrupts``).
A signal handler or finalizer that runs in the middle of a change gets a `ReentryError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

from swapper.backend import NO_MEMORY, Direction, IOBackend
from swapper.config import Priority, SwapperConfig, bounded_seconds
from swapper.errors import ExtentError, ReentryError, SwapperClosedError, SwapperError
from swapper.extents.extent import Extent, ExtentState
from swapper.memory.held import watch_requests
from swapper.meters.busy import BusyTimes
from swapper.meters.observer import Observers
from swapper.scheduling.failure import behind_error, os_error, short_error, stall_error
from swapper.scheduling.handle import announce, observe
from swapper.scheduling.ledger import Ledger
from swapper.scheduling.operation import Operation, OperationState, Transfer
from swapper.scheduling.statistics import Statistics, take_snapshot
from swapper.scheduling.transfer_queue import TransferQueue
from swapper.scheduling.waiting import TICKS_PER_DEADLINE, PendingErrors, tick_seconds
from swapper.sync.bell import Bell
from swapper.sync.callbacks import call_back
from swapper.sync.interrupts import uninterrupted
from swapper.sync.lifetimes import call_when_collected
from swapper.sync.limits import start_threads
from swapper.sync.reentry import refuse_owned
from swapper.sync.timeouts import wait_in_parts
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 10.0  # idle threads get at least this long to end in close(), also with timeout_seconds=0
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})  # a repeated transfer may succeed
# 1, 2, 4, ... ms: the 8 attempts of the default max_retries wait 255 ms in all.
_FIRST_DELAY_SECONDS = 0.001
_MOST_DELAY_SECONDS = 0.25
_QUEUED, _STALLED, _DONE = OperationState.QUEUED, OperationState.STALLED, OperationState.DONE


def delay_seconds(num_retries: int, *, has_moved: bool) -> float:
    """Return the pause before the ``num_retries``-th retry of a transfer."""
    # Bytes have moved: a signal, or the end of a file system's extent, made the transfer short. No pause helps there.
    # min(..., 16): a large max_retries would make 2.0 ** 1024, which raises OverflowError.
    return 0.0 if has_moved else min(_FIRST_DELAY_SECONDS * 2.0 ** min(num_retries - 1, 16), _MOST_DELAY_SECONDS)


def _watch(reference: weakref.ref[IOScheduler], stop: Bell, seconds: float) -> None:
    # A weak reference: this thread must not keep alive a scheduler that nobody closed.
    while not stop.wait(seconds):
        scheduler = reference()
        if scheduler is None:
            return
        call_back(scheduler._on_tick, "looking for transfers that hang")
        del scheduler  # else it would live until the next tick


class _Thread(threading.local):
    backlog: deque[Operation | Transfer] | None = None  # transfers that this thread is submitting, see _submit_all


class IOScheduler(Uncopyable):
    """All unfinished operations, and in which order they may run.

    Thread safe. Callbacks and waiters never run under its lock.
    """

    def __init__(
        self,
        backend: IOBackend,
        config: SwapperConfig,
        busy: BusyTimes | None = None,
        free: Callable[[Extent], None] = lambda extent: None,
    ) -> None:
        """``free``: called with a freed extent when its last request has ended."""
        self.pid = os.getpid()
        self._backend = backend
        self._free_extent = free
        self._config = config
        # Guards the queues, the ledgers and all operations. Taken before the swapper's allocator lock (in _free_extent)
        # and never around backend.submit, callbacks or observers. Re-entrant, so that a finalizer is refused and does
        # not hang.
        self._lock: Any = threading.RLock()
        self.observers = Observers()
        shared = (config, backend, self._on_complete, BusyTimes(busy), self.observers)
        self.queues = tuple(TransferQueue(direction, *shared) for direction in Direction)
        self._ledgers: dict[Extent, Ledger] = {}
        self.requests = self._active = dict[Operation, Ledger]()  # unfinished or stalled, in submission order
        watch_requests(self)
        self._delayed: dict[Transfer, threading.Timer] = {}  # to be tried again, but not at once
        self._tick = 0
        self._closed_because = ""
        self._thread = _Thread()
        self._num_errors = 0
        self.pending = PendingErrors()
        self._tick_seconds = tick_seconds(config.deadline_seconds)
        self._stop = Bell()
        call_when_collected(self, self._stop.ring)
        arguments = (weakref.ref(self), self._stop, self._tick_seconds)
        self._watchdog = threading.Thread(target=_watch, args=arguments, name="swapper-watchdog", daemon=True)
        start_threads(self._watchdog)

    def check_process(self) -> None:
        """Raise `SwapperClosedError` in a forked child: it has none of the threads, and locks may be taken for ever."""
        if os.getpid() != self.pid:
            raise SwapperClosedError(f"this swapper belongs to process {self.pid}; a forked child must open its own")

    # -- submission --------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Start a new operation. On the main thread, call it inside `uninterrupted`.

        Raises:
            ExtentError: A read of bytes that were never written, or whose last write failed, if that is known already;
                or the extent has been freed.
            SwapperClosedError: The scheduler has been closed.
            ReentryError: A signal handler calls, in the middle of a change.
        """
        if self._lock._is_owned():
            refuse_owned(self._lock, "a read or a write")
        finished: list[Operation] = []
        to_submit: deque[Operation | Transfer] = deque()
        with self._lock:
            if self._closed_because:
                raise SwapperClosedError(self._closed_because)
            extent, queue = operation.extent, self.queues[operation.direction]
            if extent.state is not ExtentState.LIVE:
                raise ExtentError(extent.name, f"extent {extent.name!r} has been freed; allocate it again to use it")
            ledger = self._ledgers.get(extent)
            if ledger is None:
                ledger = self._ledgers[extent] = Ledger(extent)
            ledger.admit(operation)
            self._active[operation] = ledger
            try:
                if operation.blockers:
                    self._block(operation, finished)
                elif ledger.has_broken or not operation.num_bytes:  # it may be over at once
                    if not self._make_ready(operation, ledger):
                        self._finish(operation, finished)
                elif queue.begin(operation, self._tick):
                    to_submit.append(operation)
            except BaseException:
                # admit() counts a write as written already. Its failure marks these bytes as broken.
                operation.failure = SwapperClosedError("an error came before it started")
                queue.withdraw(operation)
                if operation in self._active:
                    self._finish(operation, finished)
                raise
            if queue.num_queued:
                queue.pop_ready(self._tick, to_submit)
        if to_submit:
            self._submit_all(to_submit)
        if finished:
            announce(finished)

    def _block(self, operation: Operation, finished: list[Operation]) -> None:
        """Have an operation wait for its blockers, or fail if one of them hangs."""
        for earlier in operation.blockers:
            earlier.dependents = (*earlier.dependents, operation)
            self._promote(earlier, operation.priority)  # else a demand read would wait behind a queued write-back
            if earlier.state is _STALLED:
                operation.failure = behind_error(operation, earlier, self._backend)
        if operation.failure is not None:
            self._finish(operation, finished)

    def _make_ready(self, operation: Operation, ledger: Ledger) -> bool:
        """Queue an operation without blockers; return false if it is over instead."""
        try:
            if self._closed_because:
                raise SwapperClosedError(self._closed_because)
            if ledger.has_broken:
                ledger.check_broken(operation)
        except SwapperError as error:
            operation.failure = error.with_traceback(None)
            return False
        if operation.num_bytes == 0:
            return False
        self.queues[operation.direction].enqueue(operation)
        return True

    # -- hand-over ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[list[Operation]]:
        """Hold the lock for the block, then submit what is ready and announce the operations in the list.

        The block appends finished operations to the list.

        `submit` and `_on_complete` do the same by hand, at less cost."""
        finished: list[Operation] = []
        to_submit: deque[Operation | Transfer] = deque()
        with self._lock:
            yield finished
            for queue in self.queues:
                queue.pop_ready(self._tick, to_submit)
        self._submit_all(to_submit)
        announce(finished)

    def _submit_all(self, to_submit: deque[Operation | Transfer]) -> None:
        """Give transfers to the backend.

        A backend may complete requests inside ``submit``, which comes back here with the next transfers: they are left
        to the outer call, so that the stack does not grow with their number.
        """
        thread = self._thread
        if thread.backlog is not None:
            thread.backlog.extend(to_submit)
            return
        thread.backlog = to_submit
        try:
            while to_submit:
                transfer = to_submit.popleft()
                try:
                    self._backend.submit(transfer)
                except BaseException as error:  # of a user's IOBackend, say: the transfer would wait for its deadline
                    logger.exception("the backend raised instead of completing a transfer with an error")
                    self._on_complete(transfer, 0, OSError(None, f"{type(error).__name__}: {error}"))
        finally:
            thread.backlog = None

    def _on_complete(self, request: Any, transferred_bytes: int, error: OSError | None) -> None:
        """Update queues and operation after a transfer; the backend calls it on any thread."""
        finished: list[Operation] = []
        to_submit: deque[Operation | Transfer] = deque()
        queue = self.queues[request.direction]
        with self._lock:
            is_whole = queue.end(request, transferred_bytes, error)
            if is_whole is None:
                logger.warning("a transfer of bytes from %d on was completed twice, or is unknown", request.offset)
                return
            # By class: a call of the property `Operation.operation` costs more, and this runs for each transfer.
            operation: Operation = request if request.__class__ is Operation else request.operation
            operation.outstanding -= 1
            is_again = False
            if not is_whole and operation.failure is None:
                is_again = self._on_trouble(request, queue, transferred_bytes, error)
            if not is_again and request is not operation:
                request.memory = NO_MEMORY  # the backend may keep the request: the user's buffer would stay exported
            if not operation.outstanding and operation.state is not _QUEUED:  # queued: pieces are still to be cut
                self._finish(operation, finished)
            for each in self.queues:  # both: what has ended may have blocked operations of the other direction
                if each.num_queued:
                    each.pop_ready(self._tick, to_submit)
            if not queue.inflight:
                queue.on_idle()
        if to_submit:
            self._submit_all(to_submit)
        if finished and (len(finished) > 1 or finished[0].waiters or finished[0].callbacks):
            announce(finished)
        if self.observers.present:
            self.observers.notify()

    def _on_trouble(
        self, transfer: Operation | Transfer, queue: TransferQueue, transferred_bytes: int, error: OSError | None
    ) -> bool:
        """Whether the transfer is tried again; if not, its operation has failed."""
        operation = transfer.operation
        is_transient = error is None or error.errno in _TRANSIENT  # no error: the transfer was short
        is_late = self._tick - transfer.submitted_tick >= TICKS_PER_DEADLINE  # retries do not extend the deadline
        has_attempts = transfer.num_retries < self._config.max_retries and not is_late and not self._closed_because
        if is_transient and has_attempts:
            if isinstance(transfer, Operation):  # what is left of it is a piece
                transfer = Transfer.of(operation, 0, operation.num_bytes)
                transfer.submitted_tick, transfer.began_seconds = operation.submitted_tick, operation.began_seconds
            num_bytes = transfer.advance(0 if error is not None else transferred_bytes)
            queue.count_part(transfer, num_bytes, is_again=True)
            seconds = delay_seconds(transfer.num_retries, has_moved=num_bytes > 0)
            if seconds and self._delay(transfer, seconds):
                operation.outstanding += 1  # until its turn comes
            else:
                queue.enqueue_again(transfer)
            return True
        if error is not None:
            operation.failure = os_error(operation, transfer, self._backend, error)
        else:
            num_attempts = transfer.num_retries + 1
            operation.failure = short_error(operation, transfer, self._backend, transferred_bytes, num_attempts)
        queue.count_part(transfer, 0, is_again=False)
        queue.withdraw(operation)
        return False

    def _delay(self, transfer: Transfer, seconds: float) -> bool:
        """Queue a transfer again after a pause; return false if no timer thread can be started."""
        timer = threading.Timer(seconds, self._try_again, (transfer,))
        try:
            timer.start()
        except RuntimeError:  # too many threads, or the interpreter ends
            return False
        self._delayed[transfer] = timer
        return True

    def _try_again(self, transfer: Transfer) -> None:
        """Queue a delayed transfer again; runs on its timer's thread."""
        operation = transfer.operation
        with self._change() as finished:
            if self._delayed.pop(transfer, None) is None:  # all is being closed
                return
            operation.outstanding -= 1
            if operation.failure is None:
                self.queues[operation.direction].enqueue_again(transfer)
            elif not operation.outstanding and operation in self._active:
                self._finish(operation, finished)

    # -- the end of an operation -------------------------------------------------------------------------------------

    def _finish(self, operation: Operation, finished: list[Operation]) -> None:
        """End an operation and append it to ``finished``; then make ready, or end as well, what waited for it."""
        ending = {operation: None}  # not by recursion: a chain of dependents may be thousands long
        while ending:
            operation, _ = ending.popitem()
            operation.memory, operation.batch = NO_MEMORY, None
            ledger = self._active.pop(operation)  # before it is seen to be over: its memory is used again at once
            if not operation.is_finished:
                operation.is_finished = True
                if operation.failure is not None or ledger.has_broken:
                    self._fix_outcome(operation, ledger)
                finished.append(operation)
            operation.state = _DONE
            ledger.working[operation.direction].pop(operation)
            if ledger.extent.state is ExtentState.FREEING:
                self._retire(ledger.extent)
            for later in operation.dependents:
                later.blockers.pop(operation, None)
                is_next = not later.is_finished and later not in ending and not later.blockers
                if is_next and not self._make_ready(later, self._active[later]):
                    ending[later] = None
            operation.dependents = ()

    def _fix_outcome(self, operation: Operation, ledger: Ledger) -> None:
        """Record the outcome in the ledger, and a failure in the pending errors."""
        operation.is_finished = True
        ledger.finish(operation)
        if operation.failure is not None and not isinstance(operation.failure, SwapperClosedError):
            self._num_errors += 1
            self.pending.add(operation)

    def _on_tick(self) -> None:
        """End operations whose transfers hang; see [Note: hung transfers]."""
        with self._change() as finished:
            self._tick += 1
            for queue in self.queues:
                for transfer in queue.inflight:
                    is_late = self._tick - transfer.submitted_tick >= TICKS_PER_DEADLINE
                    if is_late and transfer.operation.state is not _STALLED:
                        self._stall(transfer, queue, finished)
                if (hung := queue.blocked_by) is not None:  # queued operations have no deadline of their own
                    self._end_behind(hung, queue.queued, finished)

    def _stall(self, transfer: Operation | Transfer, queue: TransferQueue, finished: list[Operation]) -> None:
        detail = f"saw no answer within {self._config.deadline_seconds:g} seconds"
        operation = transfer.operation
        queue.withdraw(operation)
        operation.failure = operation.failure or stall_error(operation, transfer, self._backend, detail)
        self._fix_outcome(operation, self._active[operation])
        operation.state = _STALLED  # it stays in _active, so that is_held() finds its memory
        finished.append(operation)
        self._end_behind(operation, list(operation.dependents), finished)

    def _end_behind(self, hung: Operation, waiting: Iterable[Operation], finished: list[Operation]) -> None:
        for operation in waiting:
            if not operation.is_finished:
                operation.failure = behind_error(operation, hung, self._backend)
                self.queues[operation.direction].withdraw(operation)
                self._finish(operation, finished)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _refuse_between(self, what: str) -> None:
        """Raise `ReentryError` if this thread is in the middle of a change, or of a submission."""
        refuse_owned(self._lock, what)
        if self._thread.backlog is not None:
            raise ReentryError(what, "the start of a read or a write")

    def wait(self, operation: Operation, timeout_seconds: float | None) -> None:
        """Block until the operation is over and raise its error; see ``Handle.wait``."""
        if not operation.is_finished:
            # Without the lock: a state that changes now costs at most a promotion without effect.
            if operation.priority > Priority.DEMAND and operation.state is not OperationState.RUNNING:
                self.promote(operation, Priority.DEMAND)
            self.sleep(operation, timeout_seconds, observes=True)
        if operation.failure is not None:
            observe(operation)
            # Each waiter raises the same object: with its traceback, it would keep the frames of all of them.
            raise operation.failure.with_traceback(None)

    def sleep(self, operation: Operation, timeout_seconds: float | None = None, *, observes: bool) -> None:
        """Block until the operation is over.

        Args:
            operation: What to wait for.
            timeout_seconds: How long at most; by default, until nothing has completed for the deadline.
            observes: The caller will raise the operation's error, so it need not be pending.

        Raises:
            StallError: It is not over.
            ReentryError: A signal handler or finalizer waits, in the middle of a change that must be completed first.
        """
        if os.getpid() != self.pid:
            self.check_process()
        if self._lock._is_owned() or self._thread.backlog is not None:
            self._refuse_between("waiting")
        left_seconds = None if timeout_seconds is None else bounded_seconds(timeout_seconds)
        # A bare lock is the cheapest thing that one thread can sleep on and another can wake.
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:  # is_finished is set under it too, and announce() reads the waiters after that
            if operation.is_finished:
                return
            operation.waiters = (*operation.waiters, waiter)
            operation.num_observers += observes
        is_woken = False
        try:
            is_woken = self._sleep(operation, waiter, left_seconds)
        finally:
            with self._lock:
                operation.num_observers -= observes
                if operation.waiters:  # else it is over
                    operation.waiters = [each for each in operation.waiters if each is not waiter]
                if observes and not is_woken and _is_over(operation) and operation.failure is not None:
                    self.pending.add(operation)  # it failed when the only one who wanted to know had gone
        if not is_woken and not _is_over(operation):
            limit = self._config.deadline_seconds if timeout_seconds is None else timeout_seconds
            detail = f"is not over after a wait of {limit:g} seconds ({operation.state.value})"
            raise stall_error(operation, None, self._backend, detail)

    def _sleep(self, operation: Operation, waiter: threading.Lock, timeout_seconds: float | None) -> bool:
        if timeout_seconds is not None:
            return wait_in_parts(lambda seconds: waiter.acquire(timeout=seconds), timeout_seconds)
        # One tick longer than the watchdog takes: it knows which transfer hangs, and ends this wait with that error.
        num_idle, num_completed = 0, -1
        while num_idle <= TICKS_PER_DEADLINE + 1:
            if waiter.acquire(timeout=self._tick_seconds) or _is_over(operation):
                return True
            before, num_completed = num_completed, sum(queue.num_taken - len(queue.inflight) for queue in self.queues)
            # A long queue on a slow drive is no stall: any completed transfer restarts the count.
            num_idle = num_idle + 1 if num_completed == before else 1
        return False

    def _wait_for_all(self, operations: Iterable[Operation]) -> None:
        """Block until all of them are over; their errors stay pending."""
        for operation in reversed([*operations]):  # when the last is over, the others are, as a rule
            if not operation.is_finished:
                self.sleep(operation, observes=False)

    def wait_for_writes(self) -> None:
        """Block until all writes submitted so far are over; their errors stay pending."""
        self._refuse_between("a flush")
        with self._lock:
            writes = [operation for operation in self._active if operation.direction is Direction.WRITE]
        self._wait_for_all(writes)

    def release(self, extent: Extent) -> None:
        """Refuse new requests of an extent, and block until the others are over.

        Its space is freed when the backend has completed all of them, also if this wait is cut off.
        """
        self._refuse_between("freeing an extent")
        with uninterrupted(), self._lock:
            if extent.state is ExtentState.FREED:
                raise ExtentError(extent.name, f"extent {extent.name!r} was freed twice")
            extent.state = ExtentState.FREEING
            ledger = self._ledgers.get(extent)
            operations = ledger.operations if ledger is not None else []
            self._retire(extent)
        self._wait_for_all(operations)

    def _retire(self, extent: Extent) -> None:
        """Free the space of an extent that is being freed, if no operation uses it."""
        ledger = self._ledgers.get(extent)
        if ledger is None or not ledger.operations:
            self._free_extent(extent)
            self._ledgers.pop(extent, None)
            extent.state = ExtentState.FREED

    def promote(self, operation: Operation, priority: Priority) -> None:
        """Raise the priority of an operation and of those it waits for."""
        self.check_process()
        refuse_owned(self._lock, "raising a priority")
        with self._lock:
            self._promote(operation, priority)

    def _promote(self, operation: Operation, priority: Priority) -> None:
        rising = [operation]
        while rising:
            operation = rising.pop()
            # What it waits for has at least its priority, always: no need to look further if it does not rise.
            if operation.priority > priority:
                self.queues[operation.direction].promote(operation, priority)
                rising.extend(operation.blockers)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, because: str, timeout_seconds: float | None = None) -> None:
        """Refuse new operations, drop those that are not at the backend, wait for the rest, and close the backend.

        Args:
            because: The message of later calls' `SwapperClosedError`.
            timeout_seconds: How long to wait for transfers at the backend; the deadline by default.
        """
        self._refuse_between("closing")
        if timeout_seconds is None:
            timeout_seconds = self._config.deadline_seconds
        timeout_seconds = bounded_seconds(timeout_seconds, "timeout_seconds")
        with self._change() as finished:
            self._closed_because = self._closed_because or because
            delayed = dict(self._delayed)
            self._delayed.clear()  # a timer that fires from now on finds its transfer gone: see _try_again
            for transfer in delayed:
                transfer.operation.outstanding -= 1
            has_hung = any(operation.state is _STALLED for operation in self._active)
            for operation in list(self._active):
                if not operation.is_finished:
                    operation.failure = operation.failure or SwapperClosedError(self._closed_because)
                    self.queues[operation.direction].withdraw(operation)
                    if not operation.outstanding:
                        self._finish(operation, finished)
        for timer in delayed.values():
            timer.cancel()
        if not any(queue.inflight for queue in self.queues):  # idle threads end at once, but not in no time
            timeout_seconds = max(timeout_seconds, _IDLE_SECONDS)
        try:
            # What hangs has had its whole deadline already: one more second is enough.
            is_ended = self._backend.close(min(1.0, timeout_seconds) if has_hung else timeout_seconds)
        except Exception:
            logger.exception("the backend raised while it was closed")
            is_ended = False
        if not is_ended:
            logger.error("closed while transfers hang; what they use is left alone: %s", self._backend.describe())
        self._stop.ring()
        if get_ident() != self._watchdog.ident:  # a callback of a stalled operation runs there, and may close
            self._watchdog.join()
        self._end_lost(is_ended)
        while (error := self.pending.pop()) is not None:
            logger.error("closed with an error that nobody has seen: %s", error)

    def _end_lost(self, is_ended: bool) -> None:
        """End operations whose transfers no backend will ever complete."""
        with self._change() as finished:
            for operation, ledger in list(self._active.items()):
                if is_ended and operation in self._active:
                    self._finish(operation, finished)
                elif not operation.is_finished:
                    self._fix_outcome(operation, ledger)
                    finished.append(operation)

    def statistics(self, capacity_bytes: int, free_bytes: int) -> Statistics:
        """Return a consistent snapshot; the sizes are the caller's."""
        self.check_process()
        with self._lock:
            return take_snapshot(self.queues, self._active, self._backend, self._num_errors, capacity_bytes, free_bytes)


def _is_over(operation: Operation) -> bool:
    # A call, because other threads change the attribute: mypy would narrow its type after the first look.
    return operation.is_finished
