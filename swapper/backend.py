"""What a backend promises: bytes move between memory and an address space, and completion is told by a callback."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from swapper.memory.region import AlignedRegion
from swapper.sync.callbacks import log_raised

CompletionCallback = Callable[["IORequest", int, OSError | None], None]
"""Called once for each request with the bytes that were transferred and the error, if any."""


NO_MEMORY = memoryview(b"")
"""What a request that is over looks at: the backend may keep it for a moment more, and with it what counts as a view of the
memory."""


class Direction(IntEnum):
    """Which way the bytes go."""

    READ = 0  # from the backend into memory
    WRITE = 1  # from memory to the backend


class CorruptedDataError(OSError):
    """What a request is completed with if its bytes are not those that were written: not worth another attempt.

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
        address: Where ``memory`` starts, so that nobody has to ask for it again.
        may_pad: A write may destroy what lies beside it in the blocks at its two ends. A backend that can only write
            whole blocks must otherwise read them first.
        batch: Its parts, where the backend has divided it, by the first byte of each.
        on_complete: Called exactly once, from any thread, also from inside ``submit``.
    """

    direction: Direction
    offset: int
    memory: memoryview
    address: int
    on_complete: CompletionCallback
    may_pad: bool = False
    batch: Batch | None = None

    def release_memory(self) -> None:
        """Look at the memory no longer. For ``on_complete``, before anybody hears that it is over."""
        self.memory = NO_MEMORY

    def complete(self, transferred_bytes: int, error: OSError | None = None) -> None:
        """Tell whoever submitted the request that it is over. What goes wrong there is only logged: others need the thread."""
        try:
            self.on_complete(self, transferred_bytes, error)
        except BaseException as raised:
            log_raised(raised, "completing a transfer")


def ended(what: str) -> OSError:
    """What a request is completed with that comes when the process ends: nobody must wait for his deadline then."""
    return OSError(errno.ESHUTDOWN, f"{what} ended")


def as_os_error(error: BaseException) -> OSError:
    """What a request is completed with where carrying it out raised something."""
    if isinstance(error, OSError):
        # The traceback's frames refer to the request and so to the user's memory; the number and text are enough.
        return error.with_traceback(None)
    return OSError(None, f"{type(error).__name__}: {error}")


class Batch:
    """Parts that are one for whoever waits for them.

    Args:
        left: The parts; all that are not over yet.
        num_bytes: What ``then`` is told if all went well.
        then: Called when the last part is over, with the first byte that is not moved, and with the error if that is 0.
        request: What was divided, if that was one; the parts are called by the first byte of each.
    """

    def __init__(
        self,
        left: set[Any],
        num_bytes: int,
        then: Callable[[int, OSError | None], None],
        request: IORequest | None = None,
    ) -> None:
        if request is not None:
            request.batch = self
        self.left = left
        self._lock = threading.RLock()
        self._num_bytes = self._moved_bytes = num_bytes
        self._error: OSError | None = None
        self._then = then

    def on_over(self, part: Any, moved_bytes: int, error: OSError | None) -> None:
        """A part is over; ``moved_bytes``: the first byte of the whole that it should have moved and has not."""
        with self._lock:
            if moved_bytes < self._moved_bytes:
                self._moved_bytes, self._error = moved_bytes, error
            self.left.discard(part)
            is_last = not self.left
        if is_last:
            # Behind the first bytes, an error is told by the next attempt, which begins there.
            self._then(self._moved_bytes, None if self._moved_bytes else self._error)

    def on_complete(self, request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        """A part is a request, and completed. If it is short, nothing counts as moved."""
        is_whole = transferred_bytes == len(request.memory)
        request.release_memory()
        self.on_over(request, self._num_bytes if is_whole else 0, error)

    def submit(self, backend: IOBackend, requests: list[IORequest]) -> None:
        """Hand requests over, which are its parts, and take them out of the list."""
        self.left.update(requests, (self,))
        while requests:
            request = requests.pop(0)
            try:
                backend.submit(request)
            except Exception as error:  # others are on their way: all of them have to end
                self.on_complete(request, 0, as_os_error(error))
            del request
        self.on_over(self, self._num_bytes, None)


class IOBackend(Protocol):
    """Moves bytes between memory and one flat address space; knows nothing of extents, hazards or priorities.

    Requests may be completed in any order and on any thread. A read returns what the last *completed* write stored; the
    order of overlapping requests that are in flight together is not defined, and the scheduler never has such.
    A backend must not retry: a short transfer or a failed one is completed as it is.

    Two things a backend may have besides. ``run_bytes``: it takes transfers of so many bytes, and carries each out piece by
    piece, on all of its threads; a long operation then goes down as one. ``register_memory``: see the function of this name.
    """

    @property
    def capacity_bytes(self) -> int:
        """Size of the address space."""

    @property
    def block_bytes(self) -> int:
        """Writes of fewer bytes than this touch their neighbours in the same block; 1 where they never do."""

    @property
    def boundary_bytes(self) -> int:
        """No transfer may cross a multiple of this; 0 where any may."""

    @property
    def concurrency(self) -> int:
        """So many transfers of each direction can make progress at once."""

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""

    @property
    def num_bounced(self) -> int:
        """So many transfers went through other memory, because theirs was not aligned."""

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the file (or memory), in words, and the offset in it of a byte of the address space."""

    def describe(self) -> str:
        """Return one line that says what this is and where its bytes go."""

    def submit(self, request: IORequest) -> None:
        """Start a transfer; must not block for long, and must complete the request even if it cannot be done."""

    def close(self, timeout_seconds: float) -> bool:
        """Let running transfers end, complete the waiting ones, and release everything.

        Returns whether all of that was done within the time; if not, what a hung transfer uses is left alone.
        Idempotent.
        """


def register_memory(backend: IOBackend, region: AlignedRegion) -> Callable[[], None]:
    """Let a backend know memory beforehand, if it then transfers more cheaply; return what undoes that.

    Until then the region stays mapped, and its pages must not be given to the kernel with MADV_DONTNEED.
    """
    register = getattr(backend, "register_memory", None)
    return (lambda: None) if register is None else register(region)
