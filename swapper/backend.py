"""The interface of backends: they move bytes between memory and an address space, and call back on completion."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from swapper.memory.region import AlignedRegion
from swapper.sync.callbacks import log_raised

CompletionCallback = Callable[["IORequest", int, OSError | None], None]
"""Called once for each request with the bytes that were transferred and the error, if any."""
EndCallback = Callable[[int, OSError | None], object]
"""Called once with the first byte that is not moved (the number of bytes if all are), and the error if none is moved."""
Step = tuple[Callable[[Any], object], Any]
"""A function written in C, and its argument: see `IOBackend`."""


# Takes the place of a completed request's memory. A backend's thread may keep the request a little longer, and a view
# of the user's memory would forbid to resize or close that (BufferError).
NO_MEMORY = memoryview(b"")


class Direction(IntEnum):
    """Which way the bytes go."""

    READ = 0  # from the backend into memory
    WRITE = 1  # from memory to the backend


class CorruptedDataError(OSError):
    """The error of a request whose bytes are not those that were written. The scheduler does not retry it.

    Attributes:
        offset: The first byte, in the backend's address space, of what does not match.
        num_bytes: Its length.
    """

    def __init__(self, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        super().__init__(None, f"{num_bytes} bytes at {offset} do not match their checksum")


@dataclass(slots=True, eq=False, repr=False)
class IORequest:
    """One transfer of contiguous bytes.

    Attributes:
        direction: Read or write.
        offset: First byte in the backend's address space.
        memory: The bytes in memory; its length is the length of the transfer.
        address: Where ``memory`` starts.
        batch: The parts into which the backend has divided it.
        on_complete: Called exactly once, from any thread, also from inside ``submit``.
    """

    direction: Direction
    offset: int
    memory: memoryview
    address: int
    on_complete: CompletionCallback
    batch: Batch | None = None

    def release_memory(self) -> None:
        """Drop the view of the memory; ``on_complete`` calls this before it wakes anybody."""
        self.memory = NO_MEMORY

    def complete(self, transferred_bytes: int, error: OSError | None = None) -> None:
        """Call ``on_complete``."""
        try:
            self.on_complete(self, transferred_bytes, error)
        except BaseException as raised:  # the backend's thread has other requests to serve
            log_raised(raised, "completing a transfer")


def ended(what: str) -> OSError:
    """Return the error of a request that comes after its backend has stopped."""
    # At the end of the process, say: without it, a waiter would keep the process until its deadline.
    return OSError(errno.ESHUTDOWN, f"{what} ended")


def as_os_error(error: BaseException) -> OSError:
    """Return the error of a request whose transfer raised ``error``."""
    if isinstance(error, OSError):
        # The traceback's frames refer to the request and so to the user's memory; the number and text are enough.
        return error.with_traceback(None)
    return OSError(None, f"{type(error).__name__}: {error}")


class Batch:
    """The parts of a divided request, completed together.

    Args:
        left: The parts that are not over yet.
        num_bytes: What ``then`` gets if all went well.
        then: Called when the last part is over, with the first byte that is not moved, and with the error if that is 0.
        request: The divided request, if its parts are named by the first byte of each.
    """

    # Example: 10 MiB in parts from 0, 3, 6 and 9 MiB on. The third fails at byte 7 MiB, the others end well. `then`
    # gets (7 MiB, None), a short transfer: the next attempt begins there, and ends with the error if it persists. Bytes
    # behind a gap do not count, although they were moved. If the first part fails at byte 0, `then` gets (0, error).

    def __init__(self, left: set[Any], num_bytes: int, then: EndCallback, request: IORequest | None = None) -> None:
        if request is not None:
            request.batch = self
        self.left = left  # stall_error() reads a copy of it, to say which part hangs
        # `next` of it is 0 for the part that is over last, and only then: a single step, which takes no lock.
        # Example, 3 parts: -2, -1, 0.
        self.countdown = itertools.count(1 - len(left))
        self._lock = threading.RLock()  # guards what follows; workers of several drives end parts at once
        self._num_bytes = self._moved_bytes = num_bytes
        self._error: OSError | None = None
        self._then = then

    def on_over(self, part: Any, moved_bytes: int, error: OSError | None) -> None:
        """Take note that a part is over; ``moved_bytes``: the first byte of the whole that the part has not moved."""
        if moved_bytes < self._num_bytes:
            with self._lock:
                if moved_bytes < self._moved_bytes:
                    self._moved_bytes, self._error = moved_bytes, error
        self.left.discard(part)
        if not next(self.countdown):
            self.end()

    def end(self) -> None:
        """All parts are over."""
        self._then(self._moved_bytes, None if self._moved_bytes else self._error)

    def on_complete(self, request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        """The completion callback of parts that are requests. If one is short, nothing of the whole counts as moved."""
        is_whole = transferred_bytes == len(request.memory)
        request.release_memory()
        self.on_over(request, self._num_bytes if is_whole else 0, error)

    def submit(self, backend: IOBackend, requests: list[IORequest]) -> None:
        """Submit requests as the parts of this batch, and empty the list."""
        # The batch itself counts as one more part: it cannot be over before all are submitted, nor stay open without
        # any.
        self.left.update(requests, (self,))
        self.countdown = itertools.count(1 - len(self.left))
        while requests:
            request = requests.pop(0)
            try:
                backend.submit(request)
            except Exception as error:  # earlier ones are at the backend: the batch is over when all have ended
                self.on_complete(request, 0, as_os_error(error))
            del request  # it may be over now: this thread must not keep its memory
        self.on_over(self, self._num_bytes, None)


class IOBackend(Protocol):
    """Moves bytes between memory and one flat address space.

    A backend completes requests in any order and on any thread. A read returns what the last *completed* write stored.
    The scheduler never has overlapping requests in flight of which one writes. A backend must not retry: it completes a
    short or failed transfer as it is.

    A backend may have more attributes. ``run_bytes``: the longest transfer that it takes and divides among its own
    threads; a long operation is then one transfer. ``register_memory``: see the function of this name.
    ``step_of(request)`` returns a `Step` whose call does what ``submit`` does and completes nothing meanwhile, or None for a
    request that takes more; ``on_put()`` is called behind such a call.
    """

    @property
    def capacity_bytes(self) -> int:
        """Size of the address space."""

    @property
    def block_bytes(self) -> int:
        """Size of the blocks that a write rewrites as a whole, with the bytes beside its own; 1 if it rewrites only its own."""

    @property
    def boundary_bytes(self) -> int:
        """No transfer may cross a multiple of this; 0 if there is no such limit."""

    @property
    def concurrency(self) -> int:
        """Number of transfers of each direction that can make progress at once."""

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""

    @property
    def num_bounced(self) -> int:
        """Number of transfers that were copied through other memory, because theirs was not aligned."""

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the name of the file (or memory) for messages, and the offset in it of a byte of the address space."""

    def describe(self) -> str:
        """Return one line that says what this is and where its bytes go."""

    def submit(self, request: IORequest) -> None:
        """Start a transfer; must not block for long, and must complete the request even if it cannot be done."""

    def close(self, timeout_seconds: float) -> bool:
        """Let running transfers end, complete the waiting ones, and release everything. Idempotent.

        Returns whether that was done in time. If not, files and memory of hung transfers stay open.
        """


def register_memory(backend: IOBackend, region: AlignedRegion) -> Callable[[], None]:
    """Register memory with a backend that then transfers more cheaply; return a function that undoes it.

    Until then the region stays mapped, and its pages must not be given to the kernel with MADV_DONTNEED.
    """
    register = getattr(backend, "register_memory", None)
    return (lambda: None) if register is None else register(region)
