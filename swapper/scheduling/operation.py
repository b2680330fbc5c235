"""One read or write of an extent, from its submission to its end: the handle that users get (a future), the scheduler's
record, and its transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from numpy import ndarray

from swapper.backend import Direction, IORequest
from swapper.config import ALIGNMENT, Priority, as_priority, whole_number
from swapper.errors import ArgumentError, SwapperError
from swapper.extents.extent import Extent
from swapper.memory.buffer import BYTE, Buffer, bytes_of
from swapper.sync import interrupts
from swapper.sync.callbacks import log_raised
from swapper.uncopyable import Uncopyable

_as_character = c_char.from_buffer  # with `addressof` the cheapest way to a buffer's address


class OperationState(Enum):
    """Where an operation is. The comments say who owns it, and with it the buffer."""

    BLOCKED = "blocked"  # earlier operations on the same bytes
    QUEUED = "queued"  # the queue: ready, at least one transfer is not handed over yet
    RUNNING = "running"  # the backend: every transfer is handed over
    STALLED = "stalled"  # nobody waits any more, but the backend still has the buffer
    DONE = "done"  # nobody: the buffer is the user's again


class Handle(Uncopyable):
    """One read or write of ``num_bytes`` of an ``extent``, with its present ``priority``.

    It keeps its buffer alive until the request is over. Thread safe.

    Attributes:
        is_finished: Its outcome is fixed; the backend may still have the buffer (see ``OperationState.STALLED``).
        is_observed: Somebody has seen the error.
        failure: Why it failed.
        callbacks: Functions to be called with it when it is over.
    """

    __slots__ = ("__dict__", "__weakref__")  # as without it: a record, which the scheduler changes

    # The instances are `Operation`s: handle, scheduler's record and backend's request in one object, which is cheaper
    # to make than three. Defaults are stored on the class: millions of operations are made, and most never set these.
    # None is changed in place.
    extent: Extent
    num_bytes: int
    priority: Priority
    direction: Direction
    scheduler: Any
    state: OperationState = OperationState.BLOCKED
    is_finished: bool = False
    is_observed: bool = False
    failure: SwapperError | None = None
    callbacks: list[Callable[[Any], None]]

    def __repr__(self) -> str:
        state = self.state.value if self.failure is None else f"failed: {self.failure}"
        what = f"{self.direction.name.lower()} of {self.num_bytes} bytes of {self.extent.name!r}"
        return f"Handle({what}, {state})"

    @property
    def is_read(self) -> bool:
        """Whether bytes go from the extent into memory."""
        return self.direction is Direction.READ

    @property
    def error(self) -> SwapperError | None:
        """Why the request failed; ``None`` while it runs or if it succeeded. Reading it counts as having seen it."""
        if not self.is_finished:
            return None
        observe(self)
        return self.failure

    def done(self) -> bool:
        """Return whether the request is over, with or without an error."""
        return self.is_finished

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the request is over; a request somebody waits for has the highest priority.

        Args:
            timeout_seconds: How long to wait at most. By default, until the swapper completed no transfer at all for
                ``deadline_seconds``.

        Raises:
            SwapperError: What the request failed with.
            StallError: It was not over in time; it still runs, and may be waited for again.
        """
        if not self.is_finished:
            # Without the scheduler's lock: a state that changes now costs at most a promotion without effect.
            if self.priority > Priority.DEMAND and self.state is not OperationState.RUNNING:
                self.scheduler.promote(self, Priority.DEMAND)
            self.scheduler.sleep(self, timeout_seconds, observes=True)
        if self.failure is not None:
            observe(self)
            # Each waiter raises the same object: with its traceback, it would keep the frames of all of them.
            raise self.failure.with_traceback(None)

    def promote(self, priority: Priority = Priority.DEMAND) -> None:
        """Raise the priority of the request, and of the earlier requests that it waits for. Never lower one."""
        self.scheduler.promote(self, as_priority(priority))

    def add_done_callback(self, function: Callable[[Handle], None]) -> None:
        """Call ``function(handle)`` once when the request is over, or now if it is.

        It runs on a backend thread: it must be quick and must not wait for I/O. What it raises is only logged. A thread
        in :meth:`wait` may return before it has run.
        """
        if interrupts.pid != self.scheduler.pid:
            self.scheduler.check_process()
        # No lock: append and the pop in announce() are single steps under the interpreter's lock.
        self.callbacks.append(function)
        if self.is_finished:  # announce() may have run before the append
            announce((self,))


def observe(operation: Handle) -> SwapperError | None:
    """Return the error of a finished operation if nobody has seen it, and mark it as seen."""
    if operation.is_observed or not operation.is_finished:
        return None
    operation.is_observed = operation.failure is not None
    return operation.failure


def announce(over: Iterable[Handle]) -> None:
    """Run the callbacks of these finished operations, those that wake waiting threads first. Without the scheduler's
    lock."""
    # Several threads may do so at once: each callback is run by the one that pops it.
    for operation in over:
        while operation.callbacks:
            try:
                function = operation.callbacks.pop(0)
            except IndexError:  # another thread was faster
                break
            try:
                function(operation)
            except BaseException as error:
                log_raised(error, "a callback of a finished read or write")


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
        observers: Those of the ``callbacks`` that wake a thread which will raise the error. With one, it is not also
            kept as pending.
    """

    __slots__ = ()  # of IORequest; `Handle` has none, so the attributes below are in a dictionary

    number: int = 0
    cursor: int = 0
    outstanding: int = 0
    num_retries: int = 0
    submitted_tick: int = -1
    ready_seconds: float = 0.0
    began_seconds: float = 0.0
    blockers: dict[Operation, None] = {}  # noqa: RUF012
    retries: Sequence[Transfer] = ()
    dependents: Sequence[Operation] = ()
    observers: list[Callable[[Any], None]] = []  # noqa: RUF012

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
        if not (is_flat and (flags := buffer.flags).c_contiguous and (flags.writeable or not is_read)):
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
        self.callbacks = [] if then is None else [then]
        self.on_complete = scheduler.on_complete
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
