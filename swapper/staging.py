"""A fixed number of equal pages of host memory, lent out and taken back."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

from swapper.config import ALIGNMENT
from swapper.errors import ArenaClosedError, ArenaExhaustedError, ArgumentError, PageReleasedError
from swapper.region import AlignedRegion
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

Pin = Callable[[int, int], Callable[[], None]]
"""``pin(address, num_bytes)`` registers memory with a device's driver and returns what undoes it."""


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """A snapshot of an arena.

    Attributes:
        page_bytes: Size of each page.
        num_pages: Pages of the arena.
        num_leased: Pages that somebody holds now.
        most_leased: The most pages that were held at once.
        num_leases: Pages lent out so far.
        wait_seconds: Time that leases have spent waiting, summed over threads.
        owners: Who holds how many pages now.
    """

    page_bytes: int
    num_pages: int
    num_leased: int
    most_leased: int
    num_leases: int
    wait_seconds: float
    owners: tuple[tuple[str, int], ...]


class Page(Uncopyable):
    """Knows one lease of one page. A context manager that gives it back.

    Attributes:
        index: Which page of the arena it is.
        num_bytes: Its size.
        owner: Who asked for it, in words.
    """

    __slots__ = ("_arena", "_tensor", "index", "num_bytes", "owner")

    def __init__(self, arena: StagingArena, index: int, tensor: torch.Tensor, owner: str) -> None:
        self._arena = arena
        self._tensor: torch.Tensor | None = tensor
        self.index = index
        self.num_bytes = tensor.numel()
        self.owner = owner

    def __repr__(self) -> str:
        state = "released" if self._tensor is None else "leased"
        return f"Page({self.index}, {self.num_bytes} bytes, {state}, owner={self.owner!r})"

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tensor is not None:
            self.release()

    @property
    def is_released(self) -> bool:
        """Whether it has been given back."""
        return self._tensor is None

    @property
    def tensor(self) -> torch.Tensor:
        """The page's bytes: a 1-D uint8 tensor, a view of the arena. Do not use it after the release."""
        if self._tensor is None:
            raise PageReleasedError(
                f"page {self.index} of {self.owner or 'an unnamed owner'} was released; lease another one"
            )
        return self._tensor

    def release(self) -> None:
        """Give the page back.

        Raises:
            PageReleasedError: It was given back already.
        """
        self._arena._take_back(self)


class StagingArena(Uncopyable):
    """Knows equal pages of one aligned region and who holds them; must not know what is in them. Thread safe.

    Args:
        page_bytes: Size of a page, a multiple of 4096.
        num_pages: Number of pages.
        pin: Registers the whole region with a device's driver, once.
        deadline_seconds: How long a lease waits for a page unless told otherwise.
    """

    def __init__(
        self, page_bytes: int, num_pages: int, pin: Pin | None = None, *, deadline_seconds: float = 120.0
    ) -> None:
        if page_bytes <= 0 or page_bytes % ALIGNMENT:
            raise ArgumentError(f"page_bytes must be a positive multiple of {ALIGNMENT}, got {page_bytes}")
        if num_pages <= 0:
            raise ArgumentError(f"an arena needs at least one page, got num_pages={num_pages}")
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._deadline_seconds = deadline_seconds
        self._region = AlignedRegion(page_bytes * num_pages)
        try:
            self._unpin = pin(self._region.address, self._region.num_bytes) if pin is not None else None
        except BaseException:
            self._region.release()
            raise
        whole = torch.from_numpy(self._region.array())
        self._tensors = [whole[start : start + page_bytes] for start in range(0, whole.numel(), page_bytes)]
        # The page given back last is lent first: the kernel has backed it already, and it may still be in the cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._leased: dict[int, Page] = {}
        self._unregister: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._available = threading.Condition(self._lock)  # entered by its lock: see [Note: bells]
        self._is_closed = False
        self._most_leased = 0
        self._num_leases = 0
        self._wait_seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Size of the arena in host memory."""
        return self._region.num_bytes

    @property
    def is_pinned(self) -> bool:
        """Whether a device's driver knows the region."""
        return self._unpin is not None

    def register_with(self, register: Callable[[AlignedRegion], Callable[[], None]]) -> None:
        """Let somebody know the memory, until the arena is closed; for example ``swapper.register_memory``.

        Args:
            register: Gets the region and returns what undoes it.
        """
        self._unregister.append(register(self._region))

    def lease(self, timeout_seconds: float | None = None, *, owner: str = "") -> Page:
        """Return a page as soon as there is one; its content is undefined.

        Args:
            timeout_seconds: How long to wait at most; the arena's deadline by default.
            owner: Who asks, for the error message of those who wait in vain.

        Raises:
            ArenaExhaustedError: No page became free in time; names who holds them.
            ArenaClosedError: The arena has been closed.
        """
        with self._lock:
            if not self._free and not self._is_closed:
                self._wait(self._deadline_seconds if timeout_seconds is None else timeout_seconds)
            return self._lend(owner)

    def try_lease(self, *, owner: str = "") -> Page | None:
        """Return a page if one is free now."""
        with self._lock:
            return self._lend(owner) if self._free or self._is_closed else None

    def _wait(self, timeout_seconds: float) -> None:
        started_seconds = time.monotonic()
        has_page = self._available.wait_for(lambda: bool(self._free) or self._is_closed, timeout_seconds)
        self._wait_seconds += time.monotonic() - started_seconds
        if not has_page:
            raise ArenaExhaustedError(self.num_pages, timeout_seconds, self._owners())

    def _lend(self, owner: str) -> Page:
        if self._is_closed:
            raise ArenaClosedError("the staging arena has been closed; no page can be leased from it any more")
        index = self._free.pop()
        page = Page(self, index, self._tensors[index], owner)
        self._leased[index] = page
        self._num_leases += 1
        self._most_leased = max(self._most_leased, len(self._leased))
        return page

    def _take_back(self, page: Page) -> None:
        with self._lock:
            if page._tensor is None:
                raise PageReleasedError(
                    f"page {page.index} of {page.owner or 'an unnamed owner'} was released twice; the second "
                    "owner's data would have been overwritten"
                )
            page._tensor = None
            del self._leased[page.index]
            self._free.append(page.index)
            self._available.notify()

    def _owners(self) -> list[tuple[str, int]]:
        return Counter(page.owner for page in self._leased.values()).most_common()

    def statistics(self) -> ArenaStatistics:
        """Return a snapshot."""
        with self._lock:
            return ArenaStatistics(
                self.page_bytes,
                self.num_pages,
                len(self._leased),
                self._most_leased,
                self._num_leases,
                self._wait_seconds,
                tuple(self._owners()),
            )

    def close(self) -> None:
        """Unpin and release the memory; who waits for a page gets an error. Idempotent.

        Pages that are still held keep the memory mapped until their holders let go, but it is not pinned any more: no
        copy to or from a device may be running.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._leased:
                logger.warning("a staging arena was closed while pages are held by %s", self._owners())
            self._tensors.clear()
            self._available.notify_all()
        for unregister in self._unregister:
            unregister()
        self._unregister.clear()
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._region.release()

    def __enter__(self) -> StagingArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
