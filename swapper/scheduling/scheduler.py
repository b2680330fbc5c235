"""Orders reads and writes, bounds what is in flight, and remembers every error until somebody has seen it.

[Note: the usual case is cheap]
Dependencies and deadline of an operation are fixed once, at its submission. It reaches the backend in as few
transfers as keep that busy. Python touches it once more, when the last transfer ends. Code for retries and errors
runs only when they occur. `IOScheduler.submit` and `on_complete` do by hand what the usual operation needs, without a
call: it is one transfer, nothing has to be waited for, the backend has room, and its extent has been written and is in order.

[Note: hung transfers]
A transfer that misses its deadline fails its operation with a ``StallError``, but the kernel may still move the bytes
later. So the stalled operation stays active until the backend completes it. Meanwhile, operations on the same bytes
fail at once. Its memory and the extent's space are not reused (see [Note: whose memory it is] in
``swapper.memory.held``).

[Note: signals]
If KeyboardInterrupt came while a transfer is submitted, nobody could tell whether the backend has it and its memory. So
state changes are `uninterrupted`, and waits are not (see [Note: interrupts] in ``swapper.sync.interrupts``). That takes two
system calls, which the usual operation can do without. CPython handles signals only where a function begins, where one
written in C has been called, and where a loop goes back to its start. `IOScheduler.submit` has none of these from its first
change of a ledger to the call that hands the operation over: an interrupt finds nothing done, or all.
A signal handler or finalizer that runs in the middle of a change gets a `ReentryError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

from swapper.backend import NO_MEMORY, Direction, IOBackend
from swapper.config import ALIGNMENT, Priority, SwapperConfig, bounded_seconds
from swapper.errors import ExtentError, ReentryError, SwapperClosedError
from swapper.extents.allocator import SpaceAllocator
from swapper.extents.extent import Extent, ExtentState
from swapper.memory.held import watch_requests
from swapper.meters import MOST_SPANS, BusyTimes, Observers
from swapper.scheduling import waiting
from swapper.scheduling.failure import behind_error, stall_error, transfer_error
from swapper.scheduling.ledger import Ledger
from swapper.scheduling.operation import Operation, OperationState, Transfer, announce
from swapper.scheduling.statistics import Statistics
from swapper.scheduling.transfer_queue import TransferQueue
from swapper.sync import interrupts
from swapper.sync.bell import Bell
from swapper.sync.lifetimes import call_when_collected
from swapper.sync.limits import start_threads
from swapper.sync.reentry import refuse_owned
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 10.0  # idle threads get at least this long to end in close(), also with timeout_seconds=0
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})  # a repeated transfer may succeed
_BLOCKED, _QUEUED, _RUNNING, _STALLED, _DONE = OperationState


def _nothing(*_: object) -> None: ...


class _Thread(threading.local):
    backlog: deque[Operation | Transfer] | None = None  # transfers that this thread is submitting, see _submit_all


class IOScheduler(Uncopyable):
    """All unfinished operations, and in which order they may run.

    Thread safe. Callbacks and waiters never run under its lock.
    """

    def __init__(self, backend: IOBackend, config: SwapperConfig, busy: BusyTimes | None = None) -> None:
        self.pid = interrupts.pid
        self._backend = backend
        self.block_bytes = backend.block_bytes
        # Of the extents: the space of one is free when it has been freed and its last request has ended.
        self.allocator = SpaceAllocator(backend.capacity_bytes)
        self._config = config
        self._step_of = getattr(backend, "step_of", _nothing)
        # `bool` does nothing, and being a builtin it costs no Python call.
        self._on_put: Callable[[], object] = getattr(backend, "on_put", bool)
        # Guards the queues, the ledgers and all operations. Taken before the allocator's lock (in _retire) and never
        # around backend.submit, callbacks or observers. Re-entrant, so that a finalizer is refused and does not hang.
        self.lock: Any = threading.RLock()
        self.observers = Observers()
        shared = (config, backend, BusyTimes(busy), self.observers)
        self.queues = tuple(TransferQueue(direction, *shared) for direction in Direction)
        self._ledgers: dict[Extent, Ledger] = {}
        self.requests = self._active = dict[Operation, Ledger]()  # unfinished or stalled, in submission order
        watch_requests(self)
        self._delayed: dict[Transfer, threading.Timer] = {}  # transfers that are tried again after a pause
        self._tick = self._num_errors = 0
        self._closed_because = ""
        self._thread = _Thread()
        self.pending = waiting.PendingErrors()
        self.tick_seconds = waiting.tick_seconds(config.deadline_seconds)
        self._stop = Bell()
        call_when_collected(self, self._stop.ring)
        arguments = (weakref.WeakMethod(self._on_tick), self._stop, self.tick_seconds)
        self._watchdog = threading.Thread(target=waiting.watch, args=arguments, name="swapper-watchdog", daemon=True)
        start_threads(self._watchdog)

    def check_process(self) -> None:
        """Raise `SwapperClosedError` in a forked child: it has none of the threads, and locks may be taken for ever."""
        if interrupts.pid != self.pid:
            raise SwapperClosedError(f"this swapper belongs to process {self.pid}; a forked child must open its own")

    # -- submission --------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Start a new operation.

        Raises:
            ExtentError: A read of bytes that were never written, or whose last write failed, if that is known already;
                or the extent has been freed.
            SwapperClosedError: The scheduler has been closed, or belongs to the parent of this process.
            SwapperError: An earlier operation failed, and nobody waited for it.
            ReentryError: A signal handler calls, in the middle of a change.
        """
        if interrupts.pid != self.pid:
            self.check_process()
        if self.pending.operations:
            self.pending.raise_first()
        if self.lock._is_owned():
            refuse_owned(self.lock, "a read or a write")
        queue, num_bytes, offset = self.queues[operation.direction], operation.num_bytes, operation.offset
        start, stop = operation.hazard_start, operation.hazard_stop
        try:
            with self.lock:
                ledger, num_inflight = self._ledgers.get(operation.extent), len(queue.inflight)
                step, place = None, 0
                if (
                    ledger is not None
                    and ledger.is_plain
                    and not self._closed_because
                    and not queue.num_queued  # else their priorities decide
                    # The backend has room: see `TransferQueue.is_backend_full`.
                    and queue.inflight_bytes <= queue.most_bytes
                    and (num_inflight < queue.limit or queue.inflight_bytes < queue.few_bytes)
                    and num_inflight < queue.most_inflight
                    # It is one transfer: see `TransferQueue._cut`.
                    and 0 < num_bytes <= queue.longest_bytes - offset % ALIGNMENT
                    and (not queue.boundary_bytes or offset % queue.boundary_bytes + num_bytes <= queue.boundary_bytes)
                ):
                    rows, longest_bytes = ledger.rows, ledger.longest_bytes
                    place = bisect_left(rows, (stop,))
                    # No others may touch the same bytes: see `Ledger.overlaps`.
                    if not place or rows[place - 1][0] <= start - longest_bytes:
                        step = self._step_of(operation)
                if step is not None and ledger is not None:
                    put, job = step
                    if self.observers.present:  # else no clock is read
                        operation.ready_seconds = operation.began_seconds = time.perf_counter()
                    if not num_inflight:
                        for spans in queue.busy_spans:
                            spans.begun[:] = (time.perf_counter(),)
                    # From here on nothing is called, and nothing is repeated: see [Note: signals].
                    ledger.longest_bytes = longest_bytes if longest_bytes > stop - start else stop - start
                    ledger.num_admitted = operation.number = number = ledger.num_admitted + 1
                    rows[place:place] = ((start, number, operation),)
                    self._active[operation] = ledger
                    operation.state = _RUNNING
                    operation.cursor, operation.outstanding, operation.submitted_tick = num_bytes, 1, self._tick
                    queue.inflight[operation] = num_bytes
                    queue.inflight_bytes += num_bytes
                    queue.num_taken += 1
                    put(job)
                    return
        finally:
            try:
                self._on_put()
            except BaseException:  # an interrupt in it: the backend's thread has to wake up all the same
                self._on_put()
                raise
        with interrupts.uninterrupted(), self._change() as finished:
            self._admit(operation, finished)

    def _admit(self, operation: Operation, finished: list[Operation]) -> None:
        """Note an operation in any case, inside of `_change`."""
        extent = operation.extent
        if self._closed_because:
            raise SwapperClosedError(self._closed_because)
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
            elif not self._make_ready(operation, ledger):  # it is over at once
                self._finish(operation, finished)
        except BaseException:
            # admit() counts a write as written already. Its failure marks these bytes as broken.
            operation.failure = SwapperClosedError("an error came before it started")
            self.queues[operation.direction].withdraw(operation)
            if operation in self._active:
                self._finish(operation, finished)
            raise

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
        if self._closed_because:
            operation.failure = SwapperClosedError(self._closed_because)
        elif ledger.has_broken:
            operation.failure = ledger.broken_error(operation)
        if operation.failure is not None or operation.num_bytes == 0:
            return False
        self.queues[operation.direction].enqueue(operation)
        return True

    # -- hand-over ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[list[Operation]]:
        """Hold the lock for the block, then submit what is ready and announce the operations in the list.

        The block appends finished operations to the list.

        `submit` and `on_complete` do the same by hand, at less cost."""
        finished: list[Operation] = []
        to_submit: deque[Operation | Transfer] = deque()
        with self.lock:
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
                except BaseException as error:
                    self._on_raised(transfer, error)
        finally:
            thread.backlog = None

    def _on_raised(self, transfer: Operation | Transfer, error: BaseException) -> None:
        """End a transfer that a backend did not take: a user's IOBackend, say. Else it would wait for its deadline."""
        logger.error("the backend raised instead of completing a transfer with an error", exc_info=error)
        self.on_complete(transfer, 0, OSError(None, f"{type(error).__name__}: {error}"))

    def on_complete(self, request: Any, transferred_bytes: int, error: OSError | None) -> None:
        """Update queues and operation after a transfer; the backend calls it on any thread."""
        finished: list[Operation] = []
        to_submit: deque[Operation | Transfer] = deque()
        queue = self.queues[request.direction]
        with self.lock:
            num_bytes = queue.inflight.pop(request, None)
            if num_bytes is None:
                logger.warning("a transfer of bytes from %d on was completed twice, or is unknown", request.offset)
                return
            queue.inflight_bytes -= num_bytes
            # By class: a call of the property `Operation.operation` costs more, and this runs for each transfer.
            operation: Operation = request if request.__class__ is Operation else request.operation
            operation.outstanding -= 1
            is_again = False
            if error is None and transferred_bytes == num_bytes:
                queue.num_bytes += num_bytes
                queue.num_transfers += 1
                if self.observers.present:
                    queue.add_record(request, num_bytes)
            elif operation.failure is None:
                is_again = self._on_trouble(request, queue, transferred_bytes, error)
            if not is_again and request is not operation:
                request.memory = NO_MEMORY  # the backend may keep the request: the user's buffer would stay exported
            if not operation.outstanding and operation.state is not _QUEUED:  # queued: pieces are still to be cut
                ledger = self._active[operation]
                if operation.failure is not None or operation.dependents or not ledger.is_plain:
                    self._finish(operation, finished)
                else:  # as `_finish`, by hand: see [Note: the usual case is cheap]
                    operation.memory, operation.batch = NO_MEMORY, None
                    del self._active[operation]
                    operation.is_finished, operation.state = True, _DONE
                    del ledger.rows[bisect_left(ledger.rows, (operation.hazard_start, operation.number))]
                    if not ledger.rows:
                        ledger.longest_bytes = 0
                    finished.append(operation)
            for each in self.queues:  # both: what has ended may have blocked operations of the other direction
                if each.num_queued:
                    each.pop_ready(self._tick, to_submit)
            if not queue.inflight:
                for spans in queue.busy_spans:
                    if spans.begun:
                        # First: `BusyTimes.seconds` looks without this lock. It may find it twice, but never misses it.
                        spans.ended.append((spans.begun[0], time.perf_counter()))
                        spans.begun.clear()
                        if len(spans.ended) > MOST_SPANS:
                            spans.add_up()
        if to_submit:
            self._submit_all(to_submit)
        for each_over in finished:
            if each_over.callbacks:  # a call less where there are none
                announce((each_over,))
        if self.observers.present:
            self.observers.notify()

    def _on_trouble(
        self, transfer: Operation | Transfer, queue: TransferQueue, transferred_bytes: int, error: OSError | None
    ) -> bool:
        """Whether the transfer is tried again; if not, its operation has failed."""
        operation = transfer.operation
        is_transient = error is None or error.errno in _TRANSIENT  # no error: the transfer was short
        # Retries do not extend the deadline.
        is_late = self._tick - transfer.submitted_tick >= waiting.TICKS_PER_DEADLINE
        has_attempts = transfer.num_retries < self._config.max_retries and not is_late and not self._closed_because
        if is_transient and has_attempts:
            if isinstance(transfer, Operation):  # a retry covers only the bytes that are left: a Transfer can
                transfer = Transfer.of(operation, 0, operation.num_bytes)
                transfer.submitted_tick, transfer.began_seconds = operation.submitted_tick, operation.began_seconds
            num_bytes = transfer.advance(0 if error is not None else transferred_bytes)
            queue.count_part(transfer, num_bytes, is_again=True)
            seconds = waiting.delay_seconds(transfer.num_retries, has_moved=num_bytes > 0)
            if seconds:
                timer = threading.Timer(seconds, self._try_again, (transfer,))
                with contextlib.suppress(RuntimeError):  # too many threads, or the interpreter ends: then at once
                    timer.start()
                    self._delayed[transfer] = timer
            if transfer in self._delayed:
                operation.outstanding += 1  # until its turn comes
            else:
                queue.enqueue_again(transfer)
            return True
        operation.failure = transfer_error(operation, transfer, self._backend, transferred_bytes, error)
        queue.count_part(transfer, 0, is_again=False)
        queue.withdraw(operation)
        return False

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
                    self._record_outcome(operation, ledger)
                finished.append(operation)
            operation.state = _DONE
            ledger.remove(operation)
            if ledger.extent.state is ExtentState.FREEING:
                self._retire(ledger.extent)
            for later in operation.dependents:
                later.blockers.pop(operation, None)
                is_next = not later.is_finished and later not in ending and not later.blockers
                if is_next and not self._make_ready(later, self._active[later]):
                    ending[later] = None
            operation.dependents = ()

    def _record_outcome(self, operation: Operation, ledger: Ledger) -> None:
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
                    is_late = self._tick - transfer.submitted_tick >= waiting.TICKS_PER_DEADLINE
                    if is_late and transfer.operation.state is not _STALLED:
                        self._stall(transfer, queue, finished)
                if (hung := queue.blocked_by) is not None:  # queued operations have no deadline of their own
                    self._end_behind(hung, queue.queued, finished)

    def _stall(self, transfer: Operation | Transfer, queue: TransferQueue, finished: list[Operation]) -> None:
        detail = f"saw no answer within {self._config.deadline_seconds:g} seconds"
        operation = transfer.operation
        queue.withdraw(operation)
        operation.failure = operation.failure or stall_error(operation, transfer, self._backend, detail)
        self._record_outcome(operation, self._active[operation])
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

    def _refuse_reentry(self, what: str) -> None:
        """Raise `ReentryError` if this thread is in the middle of a change, or of a submission."""
        refuse_owned(self.lock, what)
        if self._thread.backlog is not None:
            raise ReentryError(what, "the start of a read or a write")

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
        if interrupts.pid != self.pid:
            self.check_process()
        self._refuse_reentry("waiting")
        left_seconds = None if timeout_seconds is None else bounded_seconds(timeout_seconds)
        if not waiting.sleep(operation, left_seconds, observes=observes):
            limit = self._config.deadline_seconds if timeout_seconds is None else timeout_seconds
            detail = f"is not over after a wait of {limit:g} seconds ({operation.state.value})"
            raise stall_error(operation, None, self._backend, detail)

    def _wait_for_all(self, operations: Iterable[Operation]) -> None:
        """Block until all of them are over; their errors stay pending."""
        for operation in reversed([*operations]):  # when the last is over, the others are, as a rule
            if not operation.is_finished:
                self.sleep(operation, observes=False)

    def wait_for_writes(self) -> None:
        """Block until all writes submitted so far are over; their errors stay pending."""
        self._refuse_reentry("a flush")
        with self.lock:
            writes = [operation for operation in self._active if operation.direction is Direction.WRITE]
        self._wait_for_all(writes)

    def release(self, extent: Extent) -> None:
        """Refuse new requests of an extent, and block until the others are over.

        Its space is freed when the backend has completed all of them, also if this wait is cut off.
        """
        self._refuse_reentry("freeing an extent")
        with interrupts.uninterrupted(), self.lock:
            if extent.state is ExtentState.FREED:
                raise ExtentError(extent.name, f"extent {extent.name!r} was freed twice")
            extent.state = ExtentState.FREEING
            operations = list[Operation]()
            if (ledger := self._ledgers.get(extent)) is not None:
                ledger.is_plain, operations = False, ledger.operations
            self._retire(extent)
        self._wait_for_all(operations)

    def _retire(self, extent: Extent) -> None:
        """Free the space of an extent that is being freed, if no operation uses it."""
        ledger = self._ledgers.get(extent)
        if ledger is None or not ledger.operations:
            self.allocator.release(extent.start, extent.num_bytes)
            self._ledgers.pop(extent, None)
            extent.state = ExtentState.FREED

    def promote(self, operation: Operation, priority: Priority) -> None:
        """Raise the priority of an operation and of those it waits for."""
        self.check_process()
        refuse_owned(self.lock, "raising a priority")
        with self.lock:
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
        self._refuse_reentry("closing")
        if timeout_seconds is None:
            timeout_seconds = self._config.deadline_seconds
        timeout_seconds = bounded_seconds(timeout_seconds, "timeout_seconds")
        with self._change() as finished:
            self._closed_because = self._closed_because or because
            for transfer, timer in self._delayed.items():
                timer.cancel()
                transfer.operation.outstanding -= 1
            self._delayed.clear()  # a timer that fires now finds its transfer gone
            has_hung = any(operation.state is _STALLED for operation in self._active)
            for operation in list(self._active):
                if not operation.is_finished:
                    operation.failure = operation.failure or SwapperClosedError(self._closed_because)
                    self.queues[operation.direction].withdraw(operation)
                    if not operation.outstanding:
                        self._finish(operation, finished)
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
        with self._change() as finished:  # no backend will ever complete these
            for operation, ledger in list(self._active.items()):
                if is_ended and operation in self._active:
                    self._finish(operation, finished)
                elif not operation.is_finished:  # it stays in _active: a transfer that hangs may still use its memory
                    self._record_outcome(operation, ledger)
                    finished.append(operation)
        while (error := self.pending.pop()) is not None:
            logger.error("closed with an error that nobody has seen: %s", error)

    def statistics(self) -> Statistics:
        """Return a consistent snapshot."""
        self.check_process()
        with self.lock:
            reads, writes = self.queues
            busy = reads.busy.seconds()
            # By state and not by queue: blocked operations are in no queue.
            queued = [each.direction for each in self._active if each.state in (_BLOCKED, _QUEUED)]
            return Statistics(
                read_bytes=reads.num_bytes,
                write_bytes=writes.num_bytes,
                num_reads=reads.num_transfers,
                num_writes=writes.num_transfers,
                num_retries=reads.num_retries + writes.num_retries,
                num_errors=self._num_errors,
                num_bounced=self._backend.num_bounced,
                read_busy_seconds=busy.read,
                write_busy_seconds=busy.write,
                busy_seconds=busy.either,
                inflight_reads=len(reads.inflight),
                inflight_writes=len(writes.inflight),
                queued_reads=queued.count(Direction.READ),
                queued_writes=queued.count(Direction.WRITE),
                capacity_bytes=self.allocator.capacity_bytes,
                free_bytes=self.allocator.free_bytes,
                is_direct=self._backend.is_direct,
            )
