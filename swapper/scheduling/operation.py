"""One read or write of an extent, from its submission to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IORequest
from swapper.config import ALIGNMENT, Priority
from swapper.errors import SwapperError
from swapper.extents.extent import Extent
from swapper.memory.held import let_go


class OperationState(Enum):
    """Who holds an operation, and with it the buffer."""

    BLOCKED = "blocked"  # earlier operations on the same bytes
    QUEUED = "queued"  # the queue: ready, at least one transfer is not handed over yet
    RUNNING = "running"  # the backend: every transfer is handed over
    STALLED = "stalled"  # nobody waits any more, but the backend still has the buffer
    DONE = "done"  # nobody: the buffer is the user's again


LEGAL_OPERATION_TRANSITIONS = {
    OperationState.BLOCKED: frozenset({OperationState.QUEUED, OperationState.DONE}),
    OperationState.QUEUED: frozenset({OperationState.RUNNING, OperationState.STALLED, OperationState.DONE}),
    OperationState.RUNNING: frozenset({OperationState.QUEUED, OperationState.STALLED, OperationState.DONE}),
    OperationState.STALLED: frozenset({OperationState.DONE}),
    OperationState.DONE: frozenset[OperationState](),
}


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Operation:
    """Knows one read or write and what it waits for; all of it belongs to the scheduler, under its lock.

    Attributes:
        offset: First byte in the extent.
        stop: The byte behind its last one in the extent.
        start: First byte in the backend's address space.
        hazard_start: First byte of the extent that it touches, neighbours in the same block included.
        cursor: So many bytes have been handed to the backend.
        outstanding: Transfers at the backend, and those that have to wait before they are tried again.
        ready_seconds: When it became ready, if somebody observes transfers; 0 otherwise.
        retries: Transfers that have to be tried again.
        blockers: Unfinished earlier operations on the same bytes.
        covered: Of its blockers, those that touch no byte that it does not touch.
        dependents: Later operations that have this one among their blockers.
        error: Why it failed.
        is_finished: It is known how it ended; the backend may still have the buffer (see ``OperationState.STALLED``).
        is_observed: Somebody has seen the error.
        num_observers: So many threads wait to see it.
    """

    direction: Direction
    extent: Extent
    offset: int
    array: InitVar[npt.NDArray[np.uint8]]
    priority: Priority
    block_bytes: InitVar[int]
    num_bytes: int = field(init=False)
    stop: int = field(init=False)
    start: int = field(init=False)
    memory: memoryview | None = field(init=False)
    address: int = field(init=False)
    hazard_start: int = field(init=False)
    hazard_stop: int = field(init=False)
    may_pad: bool = field(default=False, init=False)
    cursor: int = field(default=0, init=False)
    outstanding: int = field(default=0, init=False)
    ready_seconds: float = field(default=0.0, init=False)
    retries: list[Transfer] = field(default_factory=list, init=False)
    state: OperationState = field(default=OperationState.BLOCKED, init=False)
    blockers: dict[Operation, None] = field(default_factory=dict, init=False)
    covered: list[Operation] = field(default_factory=list, init=False)
    dependents: list[Operation] = field(default_factory=list, init=False)
    error: SwapperError | None = field(default=None, init=False)
    is_finished: bool = field(default=False, init=False)
    is_observed: bool = field(default=False, init=False)
    num_observers: int = field(default=0, init=False)
    waiters: list[threading.Lock] = field(default_factory=list, init=False)
    callbacks: list[Callable[[], None]] = field(default_factory=list, init=False)

    def __post_init__(self, array: npt.NDArray[np.uint8], block_bytes: int) -> None:
        self.num_bytes = array.size
        self.stop = self.offset + array.size
        self.start = self.extent.start + self.offset
        self.memory = array.data
        self.address = array.__array_interface__["data"][0]
        self.hazard_start = self.offset - self.offset % block_bytes
        self.hazard_stop = -(-self.stop // block_bytes) * block_bytes

    def move_to(self, state: OperationState) -> None:
        """Change the state; only legal transitions are possible."""
        if state not in LEGAL_OPERATION_TRANSITIONS[self.state]:
            raise RuntimeError(f"an operation cannot go from {self.state.value} to {state.value}")
        self.state = state

    def drop_memory(self) -> None:
        """Let go of the user's buffer."""
        let_go(self)
        self.memory = None


@dataclass(slots=True, eq=False, repr=False)
class Transfer(IORequest):
    """One piece of an operation at the backend."""

    operation: Operation = field(kw_only=True)
    num_retries: int = 0
    began_seconds: float = 0.0
    """When it was handed over, if somebody observes transfers; 0 otherwise."""
    submitted_tick: int = -1
    """The watchdog's time when it was handed over first, or again after it had moved something; -1 before that."""

    def advance(self, transferred_bytes: int) -> int:
        """Leave out what has been transferred, and return how much that is.

        Only whole blocks count: the rest must start where a backend can continue without a detour.
        """
        stop = (self.offset + transferred_bytes) // ALIGNMENT * ALIGNMENT
        num_bytes = max(0, stop - self.offset)
        self.offset += num_bytes
        self.address += num_bytes
        self.memory = self.memory[num_bytes:]
        self.num_retries += 1
        if num_bytes:
            self.submitted_tick = -1
        return num_bytes
