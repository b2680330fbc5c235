"""One read or write of an extent, from its submission to its end, and its transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import Any

from numpy import ndarray

from swapper.backend import Direction, IORequest
from swapper.config import ALIGNMENT, Priority, as_priority, whole_number
from swapper.errors import ArgumentError, SwapperError
from swapper.extents.extent import Extent
from swapper.memory.buffer import BYTE, Buffer, bytes_of
from swapper.scheduling.handle import Handle, OperationState

_as_character = c_char.from_buffer  # with `addressof` the cheapest way to a buffer's address


def _nothing(*_: object) -> None: ...


class Operation(IORequest, Handle):
    """One read or write. All but its `Handle` part belongs to the scheduler, whose lock guards it.

    If it goes to the backend as a whole, as nearly all do, it is the request itself, and needs no `Transfer`.

    Attributes:
        offset: First byte in the backend's address space.
        first: First byte in the extent.
        stop: The byte behind its last one in the extent.
        hazard_start: First byte of the extent that it touches, neighbours in the same block included.
        hazard_stop: The byte behind the last one that it touches. Where these ranges of two operations overlap, and one
            writes, the later one waits.
        number: Its place in the order of submission to its extent.
        cursor: Number of bytes that have been cut into transfers.
        outstanding: Number of transfers at the backend, and of those that wait for a retry.
        ready_seconds: When it became ready, if somebody observes transfers; 0 otherwise.
        began_seconds, submitted_tick, num_retries: See `Transfer`.
        retries: Transfers to be tried again.
        blockers: Unfinished earlier operations on the same bytes.
        dependents: Later operations that have this one among their blockers.
        failure: Why it failed.
        is_finished: Its outcome is fixed; the backend may still have the buffer (see ``OperationState.STALLED``).
        is_observed: Somebody has seen the error.
        num_observers: Number of threads that wait and will raise the error. With one, it is not also kept as pending.
        callbacks: Functions to be called with it when it is over.
    """

    __slots__ = ()  # of IORequest; `Handle` has none, so the attributes below are in a dictionary

    # Defaults are stored on the class: millions of operations are made, and most never set these. None is changed in
    # place.
    number: int = 0
    cursor: int = 0
    outstanding: int = 0
    num_observers: int = 0
    num_retries: int = 0
    submitted_tick: int = -1
    ready_seconds: float = 0.0
    began_seconds: float = 0.0
    is_finished: bool = False
    is_observed: bool = False
    state: OperationState = OperationState.BLOCKED
    failure: SwapperError | None = None
    blockers: dict[Operation, None] = {}  # noqa: RUF012
    retries: Sequence[Transfer] = ()
    dependents: Sequence[Operation] = ()
    waiters: Sequence[threading.Lock] = ()
    callbacks: list[Callable[[Any], None]] = []  # noqa: RUF012

    def __init__(
        self,
        scheduler: Any,
        direction: Direction,
        extent: Extent,
        first: int,
        buffer: Buffer,
        priority: Priority,
        num_bytes: int | None = None,
        then: Callable[[Handle], None] | None = None,
    ) -> None:
        """
        Args:
            scheduler: Who runs it.
            direction, extent, priority: See above.
            first: First byte in the extent.
            buffer: See `Swapper.read`.
            num_bytes: So many bytes of the buffer; all by default.
            then: The first of its ``callbacks``.

        Raises:
            ArgumentError: They are not all inside the extent, or the memory cannot be used.
        """
        # This runs for each request: checks are comparisons here, and calls are made only for what fails them.
        if first.__class__ is not int:
            first = whole_number("offset", first)
        if priority.__class__ is not Priority:
            priority = as_priority(priority)
        array, is_read = buffer, direction is Direction.READ
        # numpy has one dtype object for uint8, so `is` is enough; by another one, bytes_of() only makes a new view.
        is_flat = buffer.__class__ is ndarray and buffer.dtype is BYTE and buffer.ndim == 1 and buffer.size
        if not (is_flat and buffer.flags.c_contiguous and (buffer.flags.writeable or not is_read)):
            array = bytes_of(buffer, for_read=is_read)
        if num_bytes is not None and whole_number("num_bytes", num_bytes) != array.size:
            if not 0 <= num_bytes <= array.size:
                raise ArgumentError(f"the buffer has {array.size} bytes, fewer than num_bytes={num_bytes}")
            array = array[:num_bytes]
        self.num_bytes = size = array.size
        self.stop = stop = first + size
        if first < 0 or stop > extent.num_bytes:
            raise ArgumentError(
                f"extent {extent.name!r} has {extent.num_bytes} bytes: {size} bytes at offset {first} are not inside it; "
                "pass a smaller num_bytes or allocate a larger extent"
            )
        self.scheduler = scheduler
        self.direction = direction
        self.extent = extent
        self.first = first
        self.priority = priority
        self.offset = extent.start + first
        self.memory = memory = array.data
        try:
            self.address = addressof(_as_character(memory))
        except (TypeError, ValueError):  # it is read-only, or empty
            self.address = array.__array_interface__["data"][0]
        # Rounded out to whole blocks, which a write rewrites: bytes [100, 5100) and blocks of 4096 give [0, 8192).
        block_bytes = scheduler.block_bytes
        self.hazard_start = first - first % block_bytes
        self.hazard_stop = -(-stop // block_bytes) * block_bytes
        if then is not None:
            self.callbacks = [then]
        self.on_complete = _nothing  # until it is handed over
        self.batch = None

    @property
    def operation(self) -> Operation:
        """Itself: code for transfers asks for their operation."""
        return self


@dataclass(slots=True, eq=False, repr=False)
class Transfer(IORequest):
    """One piece of an operation at the backend.

    Attributes:
        operation: The operation that it is a piece of.
        began_seconds: When it was submitted, if somebody observes transfers; 0 otherwise.
        num_retries: Attempts so far that have moved nothing.
        submitted_tick: The watchdog's tick at its first submission, or at the first after it had moved something; -1
            before that.
    """

    operation: Operation = field(kw_only=True)
    num_retries: int = 0
    began_seconds: float = 0.0
    submitted_tick: int = -1

    @classmethod
    def of(cls, operation: Operation, low: int, high: int) -> Transfer:
        """Bytes ``[low, high)`` of an operation."""
        return cls(
            operation.direction,
            operation.offset + low,
            operation.memory[low:high],
            operation.address + low,
            operation.on_complete,
            operation=operation,
        )

    def advance(self, transferred_bytes: int) -> int:
        """Leave out what has been transferred, and return how many bytes that is."""
        # Only whole blocks: else direct I/O would have to bounce the rest. 10,000 bytes from 0 on count as 8192.
        stop = (self.offset + transferred_bytes) // ALIGNMENT * ALIGNMENT
        num_bytes = max(0, stop - self.offset)
        self.offset += num_bytes
        self.address += num_bytes
        self.memory = self.memory[num_bytes:]
        self.batch = None  # the next attempt is divided anew
        self.num_retries += 1
        if num_bytes:  # what is left counts as a transfer of its own
            self.num_retries, self.submitted_tick = 0, -1
        return num_bytes
