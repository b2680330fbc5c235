"""The queue of one direction: which transfer comes next."""

from __future__ import annotations

import sys
import time
from collections import deque

from swapper.backend import CompletionCallback, Direction, IOBackend
from swapper.config import ALIGNMENT, Priority, SwapperConfig
from swapper.meters.busy import BusyTimes
from swapper.meters.observer import Observers, TransferRecord
from swapper.scheduling.operation import Operation, OperationState, Transfer

_QUEUED, _RUNNING, _STALLED = OperationState.QUEUED, OperationState.RUNNING, OperationState.STALLED


class TransferQueue:
    """The operations of one direction that are ready, and its transfers at the backend. The scheduler's lock guards it.

    Operations of one priority are served in the order in which they became ready. A higher priority goes first. After
    ``max_overtakes`` transfers that passed a waiting lower one, that is served: nothing starves.
    """

    def __init__(
        self,
        direction: Direction,
        config: SwapperConfig,
        backend: IOBackend,
        on_complete: CompletionCallback,
        busy: BusyTimes,
        observers: Observers,
    ) -> None:
        # Example: defaults on one drive, 4 threads and requests of 1 MiB. Then limit = 4, _few_bytes = 4 MiB, and
        # _longest_bytes = _most_bytes = 64 MiB. The backend gets
        #   32 operations of 4 KiB at once (_most_inflight: together they have fewer than 4 MiB),
        #   4 of 1 MiB (limit, and 4 MiB are reached),
        #   one of 100 MiB as two transfers, of 64 and 36 MiB, and nothing else until one of them has ended.
        # io_uring has no run_bytes: transfers of at most 1 MiB, and `limit` = 32 of them.
        self.direction = direction
        self.limit = min(config.max_inflight, backend.concurrency)
        self.num_queued = 0
        self.num_taken = 0  # transfers submitted so far, each attempt counted
        self.inflight: dict[Operation | Transfer, int] = {}  # transfers at the backend, and their lengths
        self.inflight_bytes = 0
        self.num_bytes = self.num_transfers = self.num_retries = 0
        self.busy = busy
        self._is_busy = False
        self._boundary_bytes = backend.boundary_bytes
        run_bytes: int = getattr(backend, "run_bytes", 0)  # optional, see `IOBackend`
        self._longest_bytes = max(run_bytes, config.request_bytes)
        # Short transfers may exceed `limit` up to this sum: a thread then finds the next one without waiting for
        # Python, and a demand read has no more bytes ahead of it than with long transfers.
        self._few_bytes = self.limit * config.request_bytes if run_bytes else 0
        self._most_inflight = config.max_inflight
        # While more is at the backend, nothing is added: the backend has no priorities, so a demand read waits behind
        # it.
        self._most_bytes = run_bytes or sys.maxsize
        self._max_overtakes = config.max_overtakes
        self._on_complete = on_complete
        self._queues: tuple[deque[Operation], ...] = tuple(deque() for _ in Priority)
        self._overtaken = [0 for _ in Priority]  # transfers that passed the head of this queue since its last turn
        self._observers = observers

    def begin(self, operation: Operation, tick: int) -> bool:
        """Take a ready operation. Return true if the caller must submit it now, as a whole; else it is queued.

        ``tick``: how often the watchdog has woken up so far: the clock of deadlines, see `tick_seconds`.
        """
        num_bytes, boundary = operation.num_bytes, self._boundary_bytes
        if (
            self.num_queued  # _choose() weighs their priorities
            or (len(self.inflight) >= self.limit and self.is_full)
            or self.inflight_bytes > self._most_bytes
            or num_bytes > self._longest_bytes - operation.offset % ALIGNMENT  # _cut() would make two pieces of it
            or (boundary and operation.offset % boundary + num_bytes > boundary)
        ):
            self.enqueue(operation)
            return False
        operation.state = _RUNNING
        operation.cursor = num_bytes
        operation.outstanding = 1
        operation.on_complete = self._on_complete
        operation.submitted_tick = tick
        if self._observers.present:  # else no clock is read
            operation.ready_seconds = operation.began_seconds = time.perf_counter()
        self.inflight[operation] = num_bytes
        self.inflight_bytes += num_bytes
        self.num_taken += 1
        if not self._is_busy:
            self._is_busy = True
            self.busy.begin(self.direction)
        return True

    @property
    def is_full(self) -> bool:
        """Whether the backend has no room for another transfer."""
        number, num_bytes = len(self.inflight), self.inflight_bytes
        is_busy = number >= self.limit and (num_bytes >= self._few_bytes or number >= self._most_inflight)
        return is_busy or num_bytes > self._most_bytes

    @property
    def queued(self) -> list[Operation]:
        """The operations with pieces or retries that are not submitted yet."""
        return [each for queue in self._queues for each in queue if each.state is _QUEUED]

    @property
    def blocked_by(self) -> Operation | None:
        """A hung operation, if all transfers at the backend hang and it takes no more; else None."""
        operations = [transfer.operation for transfer in self.inflight]
        return operations[0] if self.is_full and all(each.state is _STALLED for each in operations) else None

    def enqueue(self, operation: Operation) -> None:
        """Queue a ready operation."""
        if self._observers.present:
            operation.ready_seconds = time.perf_counter()
        operation.state = _QUEUED
        self._queues[operation.priority].append(operation)
        self.num_queued += 1

    def enqueue_again(self, transfer: Transfer) -> None:
        """Queue a transfer for a retry, before all others of its priority."""
        operation = transfer.operation
        operation.retries = (*operation.retries, transfer)
        if operation.state is _RUNNING:  # else it is queued already, for pieces that are still to be cut
            operation.state = _QUEUED
            self._queues[operation.priority].appendleft(operation)
            self.num_queued += 1

    def promote(self, operation: Operation, priority: Priority) -> None:
        """Give a queued operation a higher priority."""
        if operation.state is _QUEUED:
            # It stays in its old deque, where removal would be a search: _choose() skips it there.
            self._queues[priority].append(operation)
        operation.priority = priority

    def withdraw(self, operation: Operation) -> None:
        """Submit nothing more of an operation; its transfers at the backend still complete."""
        operation.retries = ()
        if operation.state is _QUEUED:
            operation.state = _RUNNING  # _choose() skips it from now on
            self.num_queued -= 1

    def pop_ready(self, tick: int, taken: deque[Operation | Transfer]) -> None:
        """Append the next transfers to ``taken``, as many as the backend has room for.

        Args:
            tick: See `begin`.
            taken: The list to append to. The caller submits its transfers when it has released the lock.
        """
        while self.num_queued and not (len(self.inflight) >= self.limit and self.is_full):
            if self.inflight_bytes > self._most_bytes:
                break
            operation = self._choose()
            if operation is None:
                break
            transfer: Operation | Transfer
            if operation.retries:  # before new pieces: their deadline is running already
                *operation.retries, transfer = operation.retries
            else:
                transfer = self._cut(operation)
            if operation.cursor >= operation.num_bytes and not operation.retries:
                operation.state = _RUNNING
                self._queues[operation.priority].popleft()
                self.num_queued -= 1
            operation.outstanding += 1
            transfer.on_complete = self._on_complete
            if transfer.submitted_tick < 0:  # another attempt has what is left of the time of the first
                transfer.submitted_tick = tick
            transfer.began_seconds = time.perf_counter() if self._observers.present else 0.0
            self.inflight[transfer] = num_bytes = len(transfer.memory)
            self.inflight_bytes += num_bytes
            self.num_taken += 1
            taken.append(transfer)
        if self.inflight and not self._is_busy:
            self._is_busy = True
            self.busy.begin(self.direction)

    def on_idle(self) -> None:
        """End the busy time: no transfer is at the backend."""
        if self._is_busy:
            self._is_busy = False
            self.busy.end(self.direction)

    def end(self, transfer: Operation | Transfer, transferred_bytes: int, error: OSError | None) -> bool | None:
        """Remove a completed transfer; return whether it has moved all its bytes, or None if it was not there."""
        num_bytes = self.inflight.pop(transfer, None)
        if num_bytes is None:
            return None
        self.inflight_bytes -= num_bytes
        if error is not None or transferred_bytes != num_bytes:
            return False
        self.num_bytes += num_bytes
        self.num_transfers += 1
        if self._observers.present:
            self._count(transfer, num_bytes)
        return True

    def count_part(self, transfer: Operation | Transfer, num_bytes: int, *, is_again: bool) -> None:
        """Count the bytes of a short or failed transfer; ``is_again``: it will be tried again."""
        self.num_retries += is_again
        self.num_bytes += num_bytes
        self._count(transfer, num_bytes)

    def _count(self, transfer: Operation | Transfer, num_bytes: int) -> None:
        if transfer.began_seconds and self._observers.present:
            operation, began = transfer.operation, transfer.began_seconds
            queued = began - operation.ready_seconds if operation.ready_seconds else 0.0
            name = operation.extent.name
            self._observers.add_record(
                TransferRecord(self.direction, name, num_bytes, queued, began, time.perf_counter())
            )

    def _choose(self) -> Operation | None:
        """Return the operation to be served next, and leave it at the head of its deque."""
        # With max_overtakes=64 and an endless supply of demand reads, a write-back gets every 65th transfer.
        chosen = -1
        for priority, queue in enumerate(self._queues):
            while queue and (queue[0].state is not _QUEUED or queue[0].priority != priority):
                queue.popleft()  # withdrawn, or promoted to another queue
            if not queue:
                self._overtaken[priority] = 0
            elif chosen < 0 or self._overtaken[priority] >= self._max_overtakes:
                chosen = priority
            else:
                self._overtaken[priority] += 1
        if chosen < 0:
            return None
        self._overtaken[chosen] = 0
        return self._queues[chosen][0]

    def _cut(self, operation: Operation) -> Operation | Transfer:
        """Return the next piece of an operation: to its end, the next boundary, or as long as the backend takes."""
        num_bytes, cursor = operation.num_bytes, operation.cursor
        start, length = operation.offset + cursor, self._longest_bytes
        if not cursor:  # the first piece ends on a block: only the two ends of an operation may be unaligned
            length -= start % ALIGNMENT
        if self._boundary_bytes:
            length = min(length, self._boundary_bytes - start % self._boundary_bytes)
        operation.cursor = stop = min(cursor + length, num_bytes)
        return operation if stop - cursor == num_bytes else Transfer.of(operation, cursor, stop)
