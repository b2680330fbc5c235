"""One read or write of an extent, from its submission to its end, and its transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest
from swapper.config import ALIGNMENT, Priority
from swapper.errors import SwapperError
from swapper.extents.extent import Extent


class OperationState(Enum):
    """Who holds an operation, and with it the buffer."""

    BLOCKED = "blocked"  # earlier operations on the same bytes
    QUEUED = "queued"  # the queue: ready, at least one transfer is not handed over yet
    RUNNING = "running"  # the backend: every transfer is handed over
    STALLED = "stalled"  # nobody waits any more, but the backend still has the buffer
    DONE = "done"  # nobody: the buffer is the user's again


class Operation:
    """One read or write and what it waits for; all of it belongs to the scheduler, under its lock.

    Attributes:
        offset: First byte in the extent.
        stop: The byte behind its last one in the extent.
        start: First byte in the backend's address space.
        hazard_start: First byte of the extent that it touches, neighbours in the same block included.
        number: Its place in the order of submission to its extent.
        may_pad: See `IORequest`.
        cursor: So many bytes have been handed to the backend.
        outstanding: Transfers at the backend, and those that have to wait before they are tried again.
        ready_seconds: When it became ready, if somebody observes transfers; 0 otherwise.
        retries: Transfers that have to be tried again.
        blockers: Unfinished earlier operations on the same bytes.
        dependents: Later operations that have this one among their blockers.
        error: Why it failed.
        is_finished: It is known how it ended; the backend may still have the buffer (see ``OperationState.STALLED``).
        is_observed: Somebody has seen the error.
        num_observers: So many threads wait to see it.
    """

    __slots__ = ("__dict__", "__weakref__")

    def __init__(
        self,
        direction: Direction,
        extent: Extent,
        offset: int,
        array: npt.NDArray[np.uint8],
        priority: Priority,
        block_bytes: int,
    ) -> None:
        self.direction = direction
        self.extent = extent
        self.offset = offset
        self.priority = priority
        self.num_bytes = num_bytes = array.size
        self.stop = stop = offset + num_bytes
        self.start = extent.start + offset
        self.memory: memoryview | None = array.data
        self.address: int = array.__array_interface__["data"][0]
        self.hazard_start = offset - offset % block_bytes
        self.hazard_stop = -(-stop // block_bytes) * block_bytes
        self.number = self.cursor = self.outstanding = self.num_observers = 0
        self.may_pad = self.is_finished = self.is_observed = False
        self.ready_seconds = 0.0
        self.state = OperationState.BLOCKED
        self.error: SwapperError | None = None
        self.blockers: dict[Operation, None] = {}
        self.retries: list[Transfer] = []
        self.dependents: list[Operation] = []
        self.waiters: list[threading.Lock] = []
        self.callbacks: list[Callable[[], None]] = []


@dataclass(slots=True, eq=False, repr=False)
class Transfer(IORequest):
    """One piece of an operation at the backend.

    Attributes:
        began_seconds: When it was handed over, if somebody observes transfers; 0 otherwise.
        num_retries: Attempts so far that have moved nothing.
        submitted_tick: The watchdog's time when it was handed over first, or again after it had moved something; -1
            before that.
    """

    operation: Operation = field(kw_only=True)
    num_retries: int = 0
    began_seconds: float = 0.0
    submitted_tick: int = -1

    def advance(self, transferred_bytes: int) -> int:
        """Leave out what has been transferred, and return how much that is.

        Only whole blocks count: the rest must start where a backend can continue without a detour.
        """
        stop = (self.offset + transferred_bytes) // ALIGNMENT * ALIGNMENT
        num_bytes = max(0, stop - self.offset)
        self.offset += num_bytes
        self.address += num_bytes
        self.memory = self.memory[num_bytes:]
        self.batch = None
        self.num_retries += 1
        if num_bytes:  # what is left counts as a transfer of its own
            self.num_retries, self.submitted_tick = 0, -1
        return num_bytes
