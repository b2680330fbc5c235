"""Orders reads and writes, bounds what is in flight, and remembers every error until somebody has seen it.

[Note: hung transfers]
A transfer that misses its deadline ends its operation for everybody who waits (``StallError``), but the kernel may
still move the bytes later. So a stalled operation stays among the active ones of its extent until the backend lets go
of it: operations on the same bytes fail at once, the extent's space is not given to anybody else, and neither is its
memory (see [Note: whose memory it is] in ``swapper.memory.held``).

[Note: signals]
A transfer that an interrupt cuts off while it is handed over would be lost: nobody could tell whether the backend has it, so its
memory could be neither used again nor given up. So changes are `uninterrupted`, and waits are not (see [Note: interrupts] in
``swapper.sync.interrupts``). What a signal handler may call, and what is refused, says [Note: coming in between] in
``swapper.sync.reentry``.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

from swapper.backend import NO_MEMORY, Direction, IOBackend, IORequest, RunsTransfers
from swapper.config import Priority, SwapperConfig, bounded_seconds
from swapper.errors import ExtentError, SwapperClosedError, SwapperError
from swapper.extents.extent import Extent, ExtentState
from swapper.memory.held import hold
from swapper.meters.busy import BusyTimes
from swapper.meters.observer import Observers
from swapper.scheduling.failure import behind_error, os_error, short_error, stall_error
from swapper.scheduling.ledger import Ledger
from swapper.scheduling.operation import Operation, OperationState, Transfer
from swapper.scheduling.pending import PendingErrors, observe
from swapper.scheduling.retries import BackOff, delay_seconds
from swapper.scheduling.statistics import Statistics, take_snapshot
from swapper.scheduling.transfer_queue import TransferQueue
from swapper.scheduling.waiting import WaitingRoom, announce, announce_callbacks
from swapper.scheduling.watchdog import TICKS_PER_DEADLINE, tick_seconds
from swapper.sync.caller import Caller
from swapper.sync.interrupts import uninterrupted
from swapper.sync.reentry import refuse_owned, refuse_reentry
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 10.0
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})


class IOScheduler(Uncopyable):
    """Knows all unfinished operations and in which order they may run; must not know how bytes move.

    Thread safe. Callbacks and waiters never run under its lock.
    """

    def __init__(
        self,
        backend: IOBackend,
        config: SwapperConfig,
        busy: BusyTimes | None = None,
        give_back: Callable[[Extent], None] = lambda extent: None,
    ) -> None:
        """``give_back``: called, under the lock, with an extent that is being freed and that nothing is at work on."""
        self._pid = os.getpid()
        self._backend = backend
        self._give_back = give_back
        self._config = config
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        limit = min(config.max_inflight, backend.concurrency)
        self.observers = Observers()
        run_bytes = backend.run_bytes if isinstance(backend, RunsTransfers) else 0
        shared = (limit, backend.boundary_bytes, run_bytes, self._on_complete, BusyTimes(busy), self.observers)
        self.queues = tuple(TransferQueue(direction, config, *shared) for direction in Direction)
        self._ledgers: dict[Extent, Ledger] = {}
        self._active: dict[Operation, Ledger] = {}  # unfinished or stalled, in submission order
        self._tick = 0
        self._closed_because = ""
        self._thread = threading.local()  # .backlog: what this thread is handing over
        self._num_errors = 0
        self.pending = PendingErrors()
        self._back_off = BackOff(self._try_again)
        self._waiting = WaitingRoom(self._lock, self.pending, backend, config.deadline_seconds, self._num_completed)
        interval = tick_seconds(config.deadline_seconds)
        self._watchdog = Caller(self._on_tick, "swapper-watchdog", "looking for transfers that hang", interval)

    def check_process(self) -> None:
        """Raise `SwapperClosedError` in a forked child: it has none of the threads, and locks may be taken for ever."""
        if os.getpid() != self._pid:
            raise SwapperClosedError(f"this swapper belongs to process {self._pid}; a forked child must open its own")

    # -- submission --------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Take a new operation.

        Raises:
            ExtentError: A read of bytes that were never written, or whose last write failed, if that is known already;
                or the extent has been freed.
            SwapperClosedError: The scheduler has been closed.
            ReentryError: A signal handler asks, in the midst of a change.
        """
        refuse_owned(self._lock, "a read or a write")
        over: list[Operation] = []
        taken: deque[Transfer] = deque()
        with uninterrupted():
            with self._lock:
                ledger = self._ledgers.get(operation.extent) or Ledger(operation.extent)
                self._check(operation, ledger)
                try:
                    self._ledgers[operation.extent] = ledger
                    self._admit(operation, ledger, over)
                except BaseException:
                    self._forget(operation, ledger)
                    raise
                self._take(taken)
            self._hand_over(taken)
            announce(over)

    def _check(self, operation: Operation, ledger: Ledger) -> None:
        if self._closed_because:
            raise SwapperClosedError(self._closed_because)
        extent = operation.extent
        if extent.state is not ExtentState.LIVE:
            raise ExtentError(extent.name, f"extent {extent.name!r} has been freed; allocate it again to use it")
        ledger.check(operation)

    def _admit(self, operation: Operation, ledger: Ledger, over: list[Operation]) -> None:
        hold(operation)
        ledger.admit(operation)
        self._active[operation] = ledger
        for earlier in operation.blockers:
            earlier.dependents.append(operation)
            self._promote(earlier, operation.priority)
            if earlier.state is OperationState.STALLED:
                operation.error = behind_error(operation, earlier, self._backend)
        if operation.error is not None or (not operation.blockers and not self._make_ready(operation, ledger)):
            self._finish(operation, over)

    def _forget(self, operation: Operation, ledger: Ledger) -> None:
        """Undo a half-made admission."""
        for earlier in operation.blockers:
            if operation in earlier.dependents:
                earlier.dependents.remove(operation)
        self.queues[operation.direction].withdraw(operation)
        operation.state = OperationState.DONE
        operation.drop_memory()
        operation.is_finished = True
        operation.error = SwapperClosedError("an error came before it started")
        # A write counts as written already, and it was not: nobody may read its bytes until somebody writes them.
        ledger.settle(operation)
        ledger.discharge(operation)
        self._active.pop(operation, None)

    def _make_ready(self, operation: Operation, ledger: Ledger) -> bool:
        """Queue an operation that waits for nothing any more; return false if it is over instead."""
        try:
            if self._closed_because:
                raise SwapperClosedError(self._closed_because)
            ledger.check_broken(operation)
        except SwapperError as error:
            operation.error = error.with_traceback(None)
            return False
        if operation.num_bytes == 0:
            return False
        self.queues[operation.direction].enqueue(operation)
        return True

    # -- hand-over ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give the backend as much as it takes."""
        taken: deque[Transfer] = deque()
        with self._lock:
            self._take(taken)
        self._hand_over(taken)

    def _take(self, taken: deque[Transfer]) -> None:
        """Take from the queues what the backend has room for."""
        for queue in self.queues:
            if queue.num_queued:
                queue.take(self._tick, taken)

    def _hand_over(self, taken: deque[Transfer]) -> None:
        """Give transfers to the backend.

        A backend may complete requests inside ``submit``, which comes back here with the next transfers: they are left
        to the outer call, so that the stack does not grow with their number.
        """
        if not taken:
            return
        backlog: deque[Transfer] | None = getattr(self._thread, "backlog", None)
        if backlog is not None:
            backlog.extend(taken)
            return
        self._thread.backlog = taken
        try:
            while taken:
                self._submit(taken.popleft())
        finally:
            self._thread.backlog = None

    def _submit(self, transfer: Transfer) -> None:
        try:
            self._backend.submit(transfer)
        except BaseException as error:
            logger.exception("the backend raised instead of completing a transfer with an error")
            self._on_complete(transfer, 0, OSError(None, f"{type(error).__name__}: {error}"))

    def _on_complete(self, request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        """Take note of a completed transfer; called by the backend on any thread."""
        if not isinstance(request, Transfer):
            raise TypeError("a backend must complete the very request that it was given")
        over: list[Operation] = []
        taken: deque[Transfer] = deque()
        operation = request.operation
        queue = self.queues[request.direction]
        is_over = True
        with self._lock:
            if request not in queue.inflight:
                logger.warning("a transfer of extent %r was completed twice", operation.extent.name)
                return
            del queue.inflight[request]
            operation.outstanding -= 1
            if error is None and transferred_bytes == len(request.memory):
                queue.count(request, transferred_bytes, is_whole=True)
            elif operation.error is None:
                is_over = not self._on_trouble(request, queue, transferred_bytes, error)
            if is_over:
                request.memory = NO_MEMORY
            if not operation.outstanding and operation.state is not OperationState.QUEUED:
                self._finish(operation, over)
            self._take(taken)
            if not queue.inflight:
                queue.rest()
        if taken:
            self._hand_over(taken)
        if over:
            announce(over)
        if self.observers.present:
            self.observers.tell()

    def _on_trouble(
        self, transfer: Transfer, queue: TransferQueue, transferred_bytes: int, error: OSError | None
    ) -> bool:
        """Whether the transfer is tried again; if not, its operation has failed."""
        operation = transfer.operation
        is_transient = error is None or error.errno in _TRANSIENT
        is_late = self._tick - transfer.submitted_tick >= TICKS_PER_DEADLINE
        has_attempts = transfer.num_retries < self._config.max_retries and not is_late and not self._closed_because
        if is_transient and has_attempts:
            queue.note_retry()
            num_bytes = transfer.advance(0 if error is not None else transferred_bytes)
            queue.count(transfer, num_bytes)
            seconds = delay_seconds(transfer.num_retries, has_moved=num_bytes > 0)
            if seconds and self._back_off.put(transfer, seconds):
                operation.outstanding += 1  # until its turn comes
            else:
                queue.enqueue_again(transfer)
            return True
        if error is not None:
            operation.error = os_error(operation, transfer, self._backend, error)
        else:
            num_attempts = transfer.num_retries + 1
            operation.error = short_error(operation, transfer, self._backend, transferred_bytes, num_attempts)
        queue.count(transfer, 0)
        queue.withdraw(operation)
        return False

    def _try_again(self, transfers: Iterable[Transfer]) -> None:
        """The turn of transfers has come that had to wait after they failed."""
        over: list[Operation] = []
        taken: deque[Transfer] = deque()
        with self._lock:
            for transfer in transfers:
                operation = transfer.operation
                operation.outstanding -= 1
                if operation.error is None:
                    self.queues[operation.direction].enqueue_again(transfer)
                elif not operation.outstanding and operation in self._active:
                    self._finish(operation, over)
            self._take(taken)
        self._hand_over(taken)
        announce(over)

    def _num_completed(self) -> int:
        """Transfers that the backend has completed so far."""
        return sum(queue.num_taken - len(queue.inflight) for queue in self.queues)

    # -- the end of an operation -------------------------------------------------------------------------------------

    def _finish(self, operation: Operation, over: list[Operation]) -> None:
        """End an operation; then make ready, or end as well, what waited for it."""
        ending = {operation: None}
        while ending:
            operation, _ = ending.popitem()
            operation.drop_memory()  # before it is seen to be over: its memory is lent again at once
            if not operation.is_finished:
                self._settle(operation)
                over.append(operation)
            operation.move_to(OperationState.DONE)
            ledger = self._active.pop(operation)
            ledger.discharge(operation)
            if ledger.extent.state is ExtentState.FREEING:
                self._retire(ledger.extent)
            for later in operation.dependents:
                later.blockers.pop(operation, None)
                if later.is_finished or later in ending:
                    continue
                self._inherit(later, operation)
                if later.error or not (later.blockers or self._make_ready(later, self._active[later])):
                    ending[later] = None
            operation.dependents.clear()

    def _inherit(self, later: Operation, ended: Operation) -> None:
        """Have an operation wait for what the one that has ended hid from it, or end it if that hangs."""
        for earlier in ended.blockers:
            if earlier.hazard_stop <= later.hazard_start or later.hazard_stop <= earlier.hazard_start:
                continue
            if earlier not in later.blockers:
                later.blockers[earlier] = None
                earlier.dependents.append(later)
            if earlier.state is OperationState.STALLED and later.error is None:
                later.error = behind_error(later, earlier, self._backend)

    def _settle(self, operation: Operation) -> None:
        """Fix how an operation ended."""
        operation.is_finished = True
        self._active[operation].settle(operation)
        if operation.error is not None and not isinstance(operation.error, SwapperClosedError):
            self._num_errors += 1
            self.pending.add(operation)

    def _on_tick(self) -> None:
        """End operations whose transfers hang; see [Note: hung transfers]."""
        over: list[Operation] = []
        with self._lock:
            self._tick += 1
            for queue in self.queues:
                for transfer in queue.inflight:
                    is_late = self._tick - transfer.submitted_tick >= TICKS_PER_DEADLINE
                    if is_late and transfer.operation.state is not OperationState.STALLED:
                        self._stall(transfer, queue, over)
                if (hung := queue.blocked_by) is not None:
                    self._end_behind(hung, queue.queued, over)
        self._pump()
        announce(over)

    def _stall(self, transfer: Transfer, queue: TransferQueue, over: list[Operation]) -> None:
        detail = f"saw no answer within {self._config.deadline_seconds:g} seconds"
        operation = transfer.operation
        queue.withdraw(operation)
        operation.error = operation.error or stall_error(operation, transfer, self._backend, detail)
        self._settle(operation)
        operation.move_to(OperationState.STALLED)
        over.append(operation)
        self._end_behind(operation, list(operation.dependents), over)

    def _end_behind(self, hung: Operation, waiting: Iterable[Operation], over: list[Operation]) -> None:
        for operation in waiting:
            if not operation.is_finished:
                operation.error = behind_error(operation, hung, self._backend)
                self.queues[operation.direction].withdraw(operation)
                self._finish(operation, over)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_seconds: float | None) -> None:
        """Block until the operation is over and raise its error; see ``Handle.wait``."""
        if not operation.is_finished:
            self.check_process()
            if operation.priority > Priority.DEMAND:
                self.promote(operation, Priority.DEMAND)
            self._waiting.wait(operation, timeout_seconds, observes=True)
        if operation.error is not None:
            observe(operation)
            raise operation.error.with_traceback(None)

    def wait_for_writes(self) -> None:
        """Block until all writes submitted so far are over; their errors stay pending."""
        refuse_reentry("a flush")
        with self._lock:
            writes = [operation for operation in self._active if operation.direction is Direction.WRITE]
        self._waiting.wait_for_all(writes)

    def release(self, extent: Extent) -> None:
        """Take no more requests of an extent, and block until all that there are are over.

        Its space goes back when the backend has let go of all of them, whether somebody waits for that or not.
        """
        refuse_reentry("freeing an extent")
        with uninterrupted(), self._lock:
            if extent.state is ExtentState.FREED:
                raise ExtentError(extent.name, f"extent {extent.name!r} was freed twice")
            if extent.state is ExtentState.LIVE:
                extent.move_to(ExtentState.FREEING)
            ledger = self._ledgers.get(extent)
            operations = ledger.operations if ledger is not None else []
            self._retire(extent)
        self._waiting.wait_for_all(operations)

    def _retire(self, extent: Extent) -> None:
        """Give the space of an extent back that is being freed, if nothing is at work on it."""
        ledger = self._ledgers.get(extent)
        if extent.state is ExtentState.FREEING and (ledger is None or not ledger.operations):
            self._give_back(extent)
            self._ledgers.pop(extent, None)
            extent.move_to(ExtentState.FREED)

    def promote(self, operation: Operation, priority: Priority) -> None:
        """Raise the priority of an operation and of those it waits for."""
        self.check_process()
        refuse_owned(self._lock, "raising a priority")
        with uninterrupted(), self._lock:
            self._promote(operation, priority)

    def _promote(self, operation: Operation, priority: Priority) -> None:
        rising = [operation]
        while rising:
            operation = rising.pop()
            # What it waits for has at least its priority, always: no need to look further if it does not rise.
            if operation.priority > priority:
                self.queues[operation.direction].promote(operation, priority)
                rising.extend(operation.blockers)

    def add_callback(self, operation: Operation, function: Callable[[], None]) -> None:
        """Have a function called when the operation is over."""
        self.check_process()
        operation.callbacks.append(function)
        if (
            operation.is_finished
        ):  # whoever announces that may have come before the function: each of us takes what is there
            announce_callbacks(operation)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, because: str, patience_seconds: float | None = None) -> None:
        """Take nothing more, drop what is not at the backend yet, wait for the rest, and close the backend.

        Args:
            because: What later calls are told.
            patience_seconds: How long to wait for what is at the backend; the deadline by default.
        """
        refuse_reentry("closing")
        if patience_seconds is None:
            patience_seconds = self._config.deadline_seconds
        patience_seconds = bounded_seconds(patience_seconds, "patience_seconds")
        over: list[Operation] = []
        with self._lock:
            self._closed_because = self._closed_because or because
            for transfer in self._back_off.cancel():
                transfer.operation.outstanding -= 1
            has_hung = any(operation.state is OperationState.STALLED for operation in self._active)
            for operation in list(self._active):
                if not operation.is_finished:
                    operation.error = operation.error or SwapperClosedError(self._closed_because)
                    self.queues[operation.direction].withdraw(operation)
                    if not operation.outstanding:
                        self._finish(operation, over)
        announce(over)
        if not any(queue.inflight for queue in self.queues):  # idle threads end at once, but not in no time
            patience_seconds = max(patience_seconds, _IDLE_SECONDS)
        try:
            is_ended = self._backend.close(min(1.0, patience_seconds) if has_hung else patience_seconds)
        except Exception:
            logger.exception("the backend raised while it was closed")
            is_ended = False
        if not is_ended:
            logger.error("closed while transfers hang; what they use is left alone: %s", self._backend.describe())
        self._watchdog.close(threading.TIMEOUT_MAX)
        self._end_lost(is_ended)
        while (error := self.pending.take()) is not None:
            logger.error("closed with an error that nobody has seen: %s", error)

    def _end_lost(self, is_ended: bool) -> None:
        """End operations whose transfers no backend will ever complete."""
        over: list[Operation] = []
        with self._lock:
            for operation in list(self._active):
                if is_ended:
                    self._finish(operation, over)
                elif not operation.is_finished:
                    self._settle(operation)
                    over.append(operation)
        announce(over)

    def statistics(self, capacity_bytes: int, free_bytes: int) -> Statistics:
        """Return a snapshot that is consistent in itself; the sizes are the caller's."""
        self.check_process()
        with self._lock:
            return take_snapshot(self.queues, self._active, self._backend, self._num_errors, capacity_bytes, free_bytes)
