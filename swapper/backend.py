"""What a backend promises: bytes move between memory and an address space, and completion is told by a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, runtime_checkable

from swapper.memory.region import AlignedRegion

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
        on_complete: Called exactly once, from any thread, also from inside ``submit``.
    """

    direction: Direction
    offset: int
    memory: memoryview
    address: int
    on_complete: CompletionCallback
    may_pad: bool = False

    def let_go(self) -> None:
        """Look at the memory no longer. For ``on_complete``, before anybody hears that it is over."""
        self.memory = NO_MEMORY

    def complete(self, transferred_bytes: int, error: OSError | None = None) -> None:
        """Tell whoever submitted the request that it is over."""
        self.on_complete(self, transferred_bytes, error)


class IOBackend(Protocol):
    """Moves bytes between memory and one flat address space; knows nothing of extents, hazards or priorities.

    Requests may be completed in any order and on any thread. A read returns what the last *completed* write stored; the
    order of overlapping requests that are in flight together is not defined, and the scheduler never has such.
    A backend must not retry: a short transfer or a failed one is completed as it is.
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


@runtime_checkable
class RunsTransfers(Protocol):
    """A backend that carries out long transfers request by request, by itself: a long operation then has few of them."""

    @property
    def run_bytes(self) -> int:
        """The most bytes of such a transfer; 0 where it takes none that is longer than a request."""


@runtime_checkable
class MemoryRegistrar(Protocol):
    """A backend that transfers more cheaply in memory that it knows beforehand."""

    def register_memory(self, region: AlignedRegion) -> Callable[[], None]:
        """Get to know memory, and return what undoes that.

        Until then the region stays mapped, and its pages must not be given to the kernel with MADV_DONTNEED.
        """


def register_memory(backend: IOBackend, region: AlignedRegion) -> Callable[[], None]:
    """Let a backend know memory, if it is of the kind that profits from it; return what undoes that."""
    return backend.register_memory(region) if isinstance(backend, MemoryRegistrar) else _nothing


def _nothing() -> None:
    """Undo the registration of memory that was never registered."""
