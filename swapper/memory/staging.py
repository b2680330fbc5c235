"""A fixed number of equal pages of host memory, lent out and taken back."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swapper.config import ALIGNMENT, bounded_seconds, whole_number
from swapper.errors import ArenaExhaustedError, ArgumentError, SwapperClosedError
from swapper.memory.held import tenants
from swapper.memory.region import AlignedRegion
from swapper.sync.reentry import refuse_owned
from swapper.uncopyable import Closable, Uncopyable, closed_unless_made

logger = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 1.0
_HELD_SECONDS = 0.01
_NUM_PAUSES = 16

Pin = Callable[[int, int], Callable[[], None] | None]
"""``pin(address, num_bytes)`` registers memory with a device's driver and returns what undoes it; None if it cannot."""


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """A snapshot of an arena.

    Attributes:
        page_bytes: Size of each page.
        num_pages: Pages of the arena.
        num_leased: Pages that somebody holds now: their owners, or a transfer after that.
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

    def __exit__(self, *error: object) -> None:
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
            raise SwapperClosedError(
                f"page {self.index} of {self.owner or 'an unnamed owner'} was released; lease another one"
            )
        self._arena.check_process()
        return self._tensor

    def release(self) -> None:
        """Give the page back. A request that still has memory of it keeps it from being lent again until it lets go.

        Raises:
            SwapperClosedError: It was given back already.
        """
        arena = self._arena
        with arena._lock:
            if self._tensor is None:
                raise SwapperClosedError(
                    f"page {self.index} of {self.owner or 'an unnamed owner'} was released twice; the second owner's data "
                    "would have been overwritten"
                )
            self._tensor = None
            del arena._leased[self.index]
            if not tenants(arena._address + self.index * arena.page_bytes, arena.page_bytes):
                arena._free.append(self.index)
                arena._available.notify()


@dataclass(frozen=True, slots=True)
class _Lease:
    array: weakref.ref[npt.NDArray[np.uint8]]
    """Lives as long as anybody has a view of the page."""
    owner: str


class StagingArena(Closable):
    """Knows equal pages of one aligned region and who holds them; must not know what is in them. Thread safe.

    A page is lent again when nobody holds it: neither who leased it, nor a read or write that was started with it and that
    the backend has not let go of, whatever became of whoever waited (see [Note: whose memory it is] in
    ``swapper.memory.held``). One that nobody can give back any more, because an interrupt came between the
    lease and its use, counts as given back.

    Args:
        page_bytes: Size of a page, a multiple of 4096.
        num_pages: Number of pages.
        pin: Registers the whole region with a device's driver, once.
        deadline_seconds: How long a lease waits for a page unless told otherwise.
    """

    def __init__(
        self, page_bytes: int, num_pages: int, pin: Pin | None = None, *, deadline_seconds: float = 120.0
    ) -> None:
        page_bytes, num_pages = whole_number("page_bytes", page_bytes), whole_number("num_pages", num_pages)
        if page_bytes <= 0 or page_bytes % ALIGNMENT:
            raise ArgumentError(f"page_bytes must be a positive multiple of {ALIGNMENT}, got {page_bytes}")
        if num_pages <= 0:
            raise ArgumentError(f"an arena needs at least one page, got num_pages={num_pages}")
        self._pid = os.getpid()
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._deadline_seconds = bounded_seconds(deadline_seconds, "deadline_seconds")
        self._region = AlignedRegion(page_bytes * num_pages)
        with closed_unless_made(self._region.release):
            self._unpin = pin(self._region.address, self._region.num_bytes) if pin is not None else None
        if self._unpin is not None:
            self._region.registrations.add(self)
        self._address = self._region.address
        self._whole = self._region.array()
        # The page given back last is lent first: the kernel has backed it already, and it may still be in the cache. What
        # is neither here nor leased was given back while a transfer had it.
        self._free = list(range(num_pages - 1, -1, -1))
        self._leased: dict[int, _Lease] = {}
        self._unregister: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._available = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._is_refusing = self._is_closed = False
        self._most_leased = 0
        self._num_leases = 0
        self._wait_seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Size of the arena in host memory."""
        return self._region.num_bytes

    def check_process(self) -> None:
        """Raise `SwapperClosedError` in a forked child, which does not have the memory."""
        if os.getpid() != self._pid:
            raise SwapperClosedError(
                f"this staging arena belongs to process {self._pid}; a forked child must make its own"
            )

    @property
    def is_pinned(self) -> bool:
        """Whether a device's driver knows the region."""
        return self._unpin is not None

    def register_with(self, register: Callable[[AlignedRegion], Callable[[], None]]) -> None:
        """Let somebody know the memory, until the arena is closed; for example `Swapper.register_memory`.

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
            SwapperClosedError: The arena has been closed, or belongs to the parent of this process.
            ReentryError: A signal handler asks, in the midst of another lease.
        """
        self.check_process()
        refuse_owned(self._lock, "leasing a page")
        timeout_seconds = self._deadline_seconds if timeout_seconds is None else bounded_seconds(timeout_seconds)
        with self._lock:
            if not self._has_page():
                self._wait(timeout_seconds)
            return self._lend(owner)

    def try_lease(self, *, owner: str = "") -> Page | None:
        """Return a page if one is free now."""
        if os.getpid() != self._pid:
            self.check_process()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            refuse_owned(self._lock, "leasing a page")
        with self._lock:
            return self._lend(owner) if self._free or self._has_page() else None

    def _has_page(self) -> bool:
        """Whether a lease need not wait."""
        if not self._free and not self._is_refusing:
            self._look_again()
        return bool(self._free) or self._is_refusing

    def _look_again(self) -> None:
        """Find pages that have come free without anybody saying so."""
        for index in [index for index, lease in self._leased.items() if lease.array() is None]:
            del self._leased[index]
        if len(self._free) + len(self._leased) < self.num_pages:
            known = {*self._free, *self._leased}
            self._free += [index for index in range(self.num_pages) if index not in known and not self._held(index)]

    def _held(self, index: int) -> bool:
        return bool(tenants(self._address + index * self.page_bytes, self.page_bytes))

    def _wait(self, timeout_seconds: float) -> None:
        started_seconds = time.monotonic()
        left_seconds = timeout_seconds
        most_seconds = max(timeout_seconds / _NUM_PAUSES, _HELD_SECONDS)
        while not (has_page := self._has_page()) and left_seconds > 0:
            # Who gives a page back says so. A transfer that lets go of one later does not: it is looked at now and then.
            pause_seconds = _HELD_SECONDS if len(self._leased) < self.num_pages else _LOOK_UP_SECONDS
            pause_seconds = min(left_seconds, pause_seconds, most_seconds)
            paused_seconds = time.monotonic()
            self._available.wait(pause_seconds)
            # A process that was stopped meanwhile (SIGSTOP, a debugger) has lost no more than this pause.
            left_seconds -= min(pause_seconds, time.monotonic() - paused_seconds)
        self._wait_seconds += time.monotonic() - started_seconds
        if not has_page:
            raise ArenaExhaustedError(self.num_pages, timeout_seconds, self._owners())

    def _lend(self, owner: str) -> Page:
        if self._is_refusing:
            raise SwapperClosedError("the staging arena has been closed; no page can be leased from it any more")
        index = self._free[-1]
        # An array of its own: when that has died, no view of the page is left (see HostFlatBuffer in infinity.device.compute).
        array = self._whole[index * self.page_bytes : (index + 1) * self.page_bytes]
        page = Page(self, index, torch.from_numpy(array), owner)
        self._leased[index] = _Lease(weakref.ref(array), owner)
        self._free.remove(index)  # a finalizer may have given another one back in between
        self._num_leases += 1
        self._most_leased = max(self._most_leased, self.num_pages - len(self._free))
        return page

    def _owners(self) -> list[tuple[str, int]]:
        owners = Counter(lease.owner for lease in self._leased.values())
        num_held = self.num_pages - len(self._free) - len(self._leased)
        if num_held:
            owners["transfers that have not ended, although nobody waits for them any more"] = num_held
        return owners.most_common()

    def statistics(self) -> ArenaStatistics:
        """Return a snapshot."""
        self.check_process()
        with self._lock:
            self._look_again()
            return ArenaStatistics(
                self.page_bytes,
                self.num_pages,
                self.num_pages - len(self._free),
                self._most_leased,
                self._num_leases,
                self._wait_seconds,
                tuple(self._owners()),
            )

    def turn_away(self) -> None:
        """Give out nothing any more: who waits for a page, or asks for one, gets an ``SwapperClosedError``.

        Pages that are held stay as they are; `close` has still to be called.
        """
        with self._lock:
            self._is_refusing = True
            self._available.notify_all()

    def close(self) -> None:
        """Unpin and release the memory; who waits for a page gets an error. Idempotent.

        Pages that are still held keep the memory mapped until their holders let go, but it is not pinned any more: no
        copy to or from a device may be running.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_refusing = self._is_closed = True
            if self._leased:
                logger.warning("a staging arena was closed while pages are held by %s", self._owners())
            self._whole = self._whole[:0].copy()
            self._available.notify_all()
        for unregister in self._unregister:
            unregister()
        self._unregister.clear()
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._region.release()
