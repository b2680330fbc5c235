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
    """The operations of one direction that are ready, and the transfers at the backend. Its owner locks.

    Operations of one priority are served in the order in which they became ready. A higher priority goes first, but
    only ``max_overtakes`` transfers may pass a waiting lower one before that gets its turn: nothing starves.
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
        self.direction = direction
        self.limit = min(config.max_inflight, backend.concurrency)
        self.num_queued = 0
        self.num_taken = 0
        """Transfers handed to the backend so far, each attempt of one counted."""
        self.inflight: dict[Transfer, int] = {}
        """Transfers at the backend, and how long they are."""
        self.inflight_bytes = 0
        self.num_bytes = self.num_transfers = self.num_retries = 0
        self.busy = busy
        self._is_busy = False
        self._boundary_bytes = backend.boundary_bytes
        run_bytes: int = getattr(backend, "run_bytes", 0)
        self._longest_bytes = max(run_bytes, config.request_bytes)
        self._most_bytes = run_bytes or sys.maxsize
        """Nothing more is handed over while more than this is at the backend: what somebody waits for must not be far behind."""
        self._max_overtakes = config.max_overtakes
        self._on_complete = on_complete
        self._queues: tuple[deque[Operation], ...] = tuple(deque() for _ in Priority)
        self._overtaken = [0 for _ in Priority]
        self._observers = observers

    @property
    def queued(self) -> list[Operation]:
        """The operations that are not handed over completely."""
        return [each for queue in self._queues for each in queue if each.state is _QUEUED]

    @property
    def blocked_by(self) -> Operation | None:
        """One of the operations that hang, if everything that the backend takes at once hangs: nothing more can start."""
        operations = [transfer.operation for transfer in self.inflight]
        is_full = len(operations) >= self.limit or self.inflight_bytes > self._most_bytes
        return operations[0] if is_full and all(each.state is _STALLED for each in operations) else None

    def enqueue(self, operation: Operation) -> None:
        """Take an operation that is ready."""
        if self._observers.present:
            operation.ready_seconds = time.perf_counter()
        operation.state = _QUEUED
        self._queues[operation.priority].append(operation)
        self.num_queued += 1

    def enqueue_again(self, transfer: Transfer) -> None:
        """Take a transfer that has to be tried again; it goes before everything of its priority."""
        operation = transfer.operation
        operation.retries.append(transfer)
        if operation.state is _RUNNING:
            operation.state = _QUEUED
            self._queues[operation.priority].appendleft(operation)
            self.num_queued += 1

    def promote(self, operation: Operation, priority: Priority) -> None:
        """Give a queued operation a higher priority; its old place is skipped when its turn comes there."""
        if operation.state is _QUEUED:
            self._queues[priority].append(operation)
        operation.priority = priority

    def withdraw(self, operation: Operation) -> None:
        """Hand nothing more of an operation over; its transfers at the backend still complete."""
        operation.retries.clear()
        if operation.state is _QUEUED:
            operation.state = _RUNNING
            self.num_queued -= 1

    def take(self, tick: int, taken: deque[Transfer]) -> None:
        """Take the next transfers, as many as the backend has room for.

        Args:
            tick: The watchdog's time.
            taken: Where they are put.
        """
        inflight = self.inflight
        while self.num_queued and len(inflight) < self.limit and self.inflight_bytes <= self._most_bytes:
            operation = self._choose()
            if operation is None:
                break
            transfer = operation.retries.pop() if operation.retries else self._cut(operation)
            operation.outstanding += 1
            if operation.cursor >= operation.num_bytes and not operation.retries:
                operation.state = _RUNNING
                self._queues[operation.priority].popleft()
                self.num_queued -= 1
            if transfer.submitted_tick < 0:  # another attempt has what is left of the time of the first
                transfer.submitted_tick = tick
            transfer.began_seconds = time.perf_counter() if self._observers.present else 0.0
            inflight[transfer] = num_bytes = len(transfer.memory)
            self.inflight_bytes += num_bytes
            self.num_taken += 1
            taken.append(transfer)
        if inflight and not self._is_busy:
            self._is_busy = True
            self.busy.begin(self.direction)

    def pop(self, transfer: Transfer) -> None:
        """A transfer is not at the backend any more."""
        self.inflight_bytes -= self.inflight.pop(transfer)

    def rest(self) -> None:
        """Nothing is at the backend, for now: the time at work ends."""
        if self._is_busy:
            self._is_busy = False
            self.busy.end(self.direction)

    def count(self, transfer: Transfer, num_bytes: int, *, is_whole: bool = False) -> None:
        """Count what a completed transfer has moved: all of it (``is_whole``), a part, or 0 if it failed."""
        self.num_bytes += num_bytes
        self.num_transfers += is_whole
        if transfer.began_seconds and self._observers.present:
            operation, began = transfer.operation, transfer.began_seconds
            queued = began - operation.ready_seconds if operation.ready_seconds else 0.0
            name = operation.extent.name
            self._observers.note(TransferRecord(self.direction, name, num_bytes, queued, began, time.perf_counter()))

    def _choose(self) -> Operation | None:
        """Return the operation whose turn it is, and leave it at the head of its queue."""
        chosen = -1
        for priority, queue in enumerate(self._queues):
            while queue and (queue[0].state is not _QUEUED or queue[0].priority != priority):
                queue.popleft()
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

    def _cut(self, operation: Operation) -> Transfer:
        """Return the next piece of an operation: to the end, the next boundary, or as much as the backend takes.

        The first piece ends on a block, so that only the two ends of an operation can be unaligned.
        """
        memory, num_bytes, cursor = operation.memory, operation.num_bytes, operation.cursor
        if memory is None:
            raise RuntimeError("an operation without memory was queued")
        start, length = operation.start + cursor, self._longest_bytes
        if not cursor:
            length -= start % ALIGNMENT
        if self._boundary_bytes:
            length = min(length, self._boundary_bytes - start % self._boundary_bytes)
        operation.cursor = stop = min(cursor + length, num_bytes)
        if stop - cursor < num_bytes:
            memory = memory[cursor:stop]
        return Transfer(
            operation.direction,
            start,
            memory,
            operation.address + cursor,
            self._on_complete,
            operation.may_pad,
            operation=operation,
        )
