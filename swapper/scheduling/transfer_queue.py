"""The queue of one direction: which transfer comes next."""

from __future__ import annotations

import sys
import time
from collections import deque

from swapper.backend import Direction, IOBackend
from swapper.config import ALIGNMENT, Priority, SwapperConfig
from swapper.meters import BusyTimes, Observers, TransferRecord
from swapper.scheduling.operation import Operation, OperationState, Transfer

_FEW_BYTES = 1 << 20  # which any drive moves within a millisecond or two
_QUEUED, _RUNNING, _STALLED = OperationState.QUEUED, OperationState.RUNNING, OperationState.STALLED


class TransferQueue:
    """The operations of one direction that are ready, and its transfers at the backend. The scheduler's lock guards it.

    Operations of one priority are served in the order in which they became ready. A higher priority goes first. After
    ``max_overtakes`` transfers that passed a waiting lower one, that is served: nothing starves.

    Where nothing is queued and the backend has room, `IOScheduler.submit` and ``on_complete`` change the counts by hand.
    """

    def __init__(
        self,
        direction: Direction,
        config: SwapperConfig,
        backend: IOBackend,
        busy: BusyTimes,
        observers: Observers,
    ) -> None:
        # Example: defaults on one drive, 4 threads and requests of 1 MiB. Then limit = 4, few_bytes = 4 MiB, and
        # longest_bytes = most_bytes = 64 MiB. The backend gets
        #   32 operations of 4 KiB at once (most_inflight: together they have fewer than 4 MiB),
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
        # Where busy periods are written to: one begins when the first transfer comes, and ends with the last.
        self.busy_spans = busy.watch(direction)
        self.boundary_bytes = backend.boundary_bytes
        run_bytes: int = getattr(backend, "run_bytes", 0)  # optional, see `IOBackend`
        self.longest_bytes = max(run_bytes, config.request_bytes)
        # Short transfers may exceed `limit` up to this sum: a thread then finds the next one without waiting for
        # Python, and a demand read has no more bytes ahead of it than with long transfers.
        self.few_bytes = max(self.limit * config.request_bytes, _FEW_BYTES) if run_bytes else 0
        self.most_inflight = config.max_inflight
        # While more is at the backend, nothing is added: the backend has no priorities, so a demand read waits behind
        # it.
        self.most_bytes = run_bytes or sys.maxsize
        self._max_overtakes = config.max_overtakes
        self._queues: tuple[deque[Operation], ...] = tuple(deque() for _ in Priority)
        self._overtaken = [0 for _ in Priority]  # transfers that passed the head of this queue since its last turn
        self.observers = observers

    @property
    def is_backend_full(self) -> bool:
        """Whether the backend has no room for another transfer."""
        number, num_bytes = len(self.inflight), self.inflight_bytes
        is_busy = number >= self.limit and (num_bytes >= self.few_bytes or number >= self.most_inflight)
        return is_busy or num_bytes > self.most_bytes

    @property
    def queued(self) -> list[Operation]:
        """The operations with pieces or retries that are not submitted yet."""
        return [each for queue in self._queues for each in queue if each.state is _QUEUED]

    @property
    def blocked_by(self) -> Operation | None:
        """A hung operation, if all transfers at the backend hang and it takes no more; else None."""
        operations = [transfer.operation for transfer in self.inflight]
        return operations[0] if self.is_backend_full and all(each.state is _STALLED for each in operations) else None

    def enqueue(self, operation: Operation) -> None:
        """Queue a ready operation."""
        if self.observers.present:
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
            tick: How often the watchdog has woken up so far: the clock of deadlines, see `tick_seconds`.
            taken: The list to append to. The caller submits its transfers when it has released the lock.
        """
        while self.num_queued and not self.is_backend_full:
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
            if transfer.submitted_tick < 0:  # another attempt has what is left of the time of the first
                transfer.submitted_tick = tick
            transfer.began_seconds = time.perf_counter() if self.observers.present else 0.0
            for spans in self.busy_spans:
                if not spans.begun:
                    spans.begun.append(time.perf_counter())
            self.inflight[transfer] = num_bytes = len(transfer.memory)
            self.inflight_bytes += num_bytes
            self.num_taken += 1
            taken.append(transfer)

    def count_part(self, transfer: Operation | Transfer, num_bytes: int, *, is_again: bool) -> None:
        """Count the bytes of a short or failed transfer; ``is_again``: it will be tried again."""
        self.num_retries += is_again
        self.num_bytes += num_bytes
        self.add_record(transfer, num_bytes)

    def add_record(self, transfer: Operation | Transfer, num_bytes: int) -> None:
        """Make the record of a transfer that is over, if it is observed."""
        if transfer.began_seconds and self.observers.present:
            operation, began = transfer.operation, transfer.began_seconds
            queued = began - operation.ready_seconds if operation.ready_seconds else 0.0
            name = operation.extent.name
            ended = time.perf_counter()
            self.observers.records.append(TransferRecord(self.direction, name, num_bytes, queued, began, ended))

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
        start, length = operation.offset + cursor, self.longest_bytes
        if not cursor:  # the first piece ends on a block: only the two ends of an operation may be unaligned
            length -= start % ALIGNMENT
        if self.boundary_bytes:
            length = min(length, self.boundary_bytes - start % self.boundary_bytes)
        operation.cursor = stop = min(cursor + length, num_bytes)
        return operation if stop - cursor == num_bytes else Transfer.of(operation, cursor, stop)
