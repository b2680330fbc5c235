"""Settings of a swapper, checked once when they are made."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, SupportsFloat

from swapper.errors import ArgumentError

ALIGNMENT = 4096
"""Direct I/O needs memory addresses, file offsets and lengths that are multiples of so many bytes."""


BackendName = Literal["auto", "threads", "uring", "aiofiles"]
"""How bytes move between memory and files; "auto" takes the fastest one that proves to work."""


LEAST_DEADLINE_SECONDS = 0.01  # no drive is sure to answer sooner
_MOST_SECONDS = min(1e9, threading.TIMEOUT_MAX)  # 31 years; a lock's acquire() raises above TIMEOUT_MAX


def bounded_seconds(seconds: float, name: str = "timeout_seconds") -> float:
    """Return a timeout that every waiting call accepts: negative ones become 0, and infinity 31 years.

    Raises:
        ArgumentError: It is no number: ``name`` says what for.
    """
    given: object = seconds
    is_number = isinstance(given, SupportsFloat) and not isinstance(given, bool)
    if not is_number or math.isnan(seconds):
        raise ArgumentError(f"{name} must be a number of seconds, got {seconds!r}; math.inf waits forever")
    return min(max(0.0, float(seconds)), _MOST_SECONDS)


class Priority(IntEnum):
    """Which requests are served first; the smaller number wins."""

    DEMAND = 0  # somebody waits for it now
    PREFETCH = 1  # somebody will need it soon
    WRITE_BACK = 2  # nobody waits for it


def whole_number(name: str, value: int) -> int:
    """``value`` as an int.

    Raises:
        ArgumentError: It is a float, a bool, or no number: ``name`` says what for.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an int, got {value!r}; convert it with int()") from None


def as_priority(value: int) -> Priority:
    """``value`` as a priority.

    Raises:
        ArgumentError: It is none.
    """
    if isinstance(value, Priority):
        return value
    try:
        return Priority(whole_number("priority", value))
    except ValueError:
        names = ", ".join(f"Priority.{each.name}" for each in Priority)
        raise ArgumentError(f"priority must be one of {names}, got {value!r}; pass one of these") from None


def round_up(num_bytes: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``num_bytes``."""
    return -(-num_bytes // multiple) * multiple


def split_at(offset: int, num_bytes: int, boundary_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range of bytes at each multiple of ``boundary_bytes``, or nowhere if that is 0.

    Yields:
        First byte of a piece, counted from ``offset``, and the one behind its last.
    """
    # split_at(6, 10, 4), bytes [6, 16) cut at 8 and 12: (0, 2), (2, 6), (6, 10)
    low = 0
    while low < num_bytes:
        room = boundary_bytes - (offset + low) % boundary_bytes if boundary_bytes else num_bytes
        high = min(num_bytes, low + room)
        yield low, high
        low = high


@dataclass(frozen=True, slots=True)
class SwapperConfig:
    """How a swapper talks to its backend.

    Attributes:
        request_bytes: Largest single transfer; longer reads and writes are cut at multiples of it. Multiple of 4096.
        num_threads: Worker threads for each direction and drive, each with one request at a time.
        max_inflight: Transfers at the backend at once, for each direction; a backend may take fewer.
        deadline_seconds: A transfer without an answer fails after this time (at least 7/8 of it). A wait fails if no
            transfer at all completes for this long. At least 0.01; ``math.inf`` for (nearly) never.
        direct: Bypass the page cache (O_DIRECT) if the file system can.
        max_retries: How often a transfer that moves nothing is tried again in a row: after EINTR, EAGAIN, or a short
            transfer.
        max_overtakes: How many transfers of higher priority may pass a waiting one of lower priority.
        backend: How bytes move between memory and files.
        verify_checksums: Store a checksum of written bytes, and verify reads.
    """

    request_bytes: int = 1 << 20
    num_threads: int = 4
    max_inflight: int = 32
    deadline_seconds: float = 120.0
    direct: bool = True
    max_retries: int = 8
    max_overtakes: int = 64
    backend: BackendName = "auto"
    verify_checksums: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        # object.__setattr__: the class is frozen, and these are converted once (numpy ints, ints as deadlines).
        for name in ("request_bytes", "num_threads", "max_inflight", "max_retries", "max_overtakes"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.request_bytes <= 0 or self.request_bytes % ALIGNMENT:
            raise ArgumentError(f"request_bytes must be a positive multiple of {ALIGNMENT}, got {self.request_bytes}")
        for name, least in (("num_threads", 1), ("max_inflight", 1), ("max_retries", 0), ("max_overtakes", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"{name} must be at least {least}, got {getattr(self, name)}")
        deadline_seconds = bounded_seconds(self.deadline_seconds, "deadline_seconds")
        if deadline_seconds < LEAST_DEADLINE_SECONDS:
            raise ArgumentError(
                f"deadline_seconds must be at least {LEAST_DEADLINE_SECONDS:g}, got {self.deadline_seconds}"
            )
        object.__setattr__(self, "deadline_seconds", deadline_seconds)
