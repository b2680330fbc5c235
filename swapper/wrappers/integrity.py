"""A backend that notices when a drive gives back other bytes than it was given.

[Note: partial segments]
A checksum says something about all bytes of its segment (see :mod:`swapper.wrappers.checksum`) or about none. So a read of a part
of a segment also needs the rest of it; and a write into a segment must first see that the rest is still right, because
the rest gets a new checksum. Either is read back first. Large requests that are always cut at the same places seldom
need that.

Nobody has to wait for anybody. Before a write is handed on, what it will change is no longer part of any segment; so
the bytes of a segment do not change while it is in the table, and what was read back of them stays true, even if others
write between and beside.

A write that is not made of whole blocks rewrites the rest of the blocks at its two ends (see ``IOBackend.block_bytes``),
and if it fails, that rest may be torn. So segments are cut at the ends of these blocks as well: what lies behind them
keeps a checksum of its own, and stays readable.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from swapper.backend import CorruptedDataError, Direction, IOBackend, IORequest, as_os_error
from swapper.config import ALIGNMENT, round_up
from swapper.errors import ArgumentError
from swapper.memory.region import AlignedRegion
from swapper.sync.timeouts import wait_in_parts
from swapper.wrappers.base import BackendWrapper
from swapper.wrappers.checksum import PAGE_BYTES, Bytes, ChecksumTable, Segment, crc32c, is_fast

logger = logging.getLogger(__name__)


class _Job:
    """Knows one request on its way, and what was read back for it.

    Attributes:
        cuts: Addresses at which segments have to end.
        drops: Of these addresses nothing is known once a write has begun.
        edges: Pages of which the request covers a part, at most two.
        to_read: Ranges to be read back before it can go on.
        read_back: By page, the first address and the bytes of such a range.
    """

    __slots__ = ("cuts", "drops", "edges", "read_back", "request", "start", "stop", "to_read")

    def __init__(self, request: IORequest, block_bytes: int, table: ChecksumTable) -> None:
        self.request = request
        self.start = start = request.offset
        self.stop = stop = start + len(request.memory)
        self.drops = (start, stop)
        self.cuts: tuple[int, ...] = (start, stop)
        if request.direction is Direction.WRITE and (start | stop) % block_bytes:
            blocks = start // block_bytes * block_bytes, min(round_up(stop, block_bytes), table.capacity_bytes)
            self.drops = blocks if request.may_pad else self.drops
            self.cuts = blocks if request.may_pad else (*blocks, start, stop)
        size = table.page_bytes
        first, last = start // size, (stop - 1) // size
        ends = (first,) if first == last else (first, last)
        self.edges = tuple(page for page in ends if start > page * size or stop < (page + 1) * size)
        self.to_read: list[tuple[int, int]] = []
        self.read_back: dict[int, tuple[int, Bytes]] = {}

    def is_cutting(self, segment: Segment) -> bool:
        """Return whether one of the request's cuts lies inside the segment."""
        return any(segment.start < address < segment.stop for address in self.cuts)

    def bytes_on_drive(self, page: int, start: int, stop: int) -> Bytes:
        """Return what was read back of a page."""
        origin, array = self.read_back[page]
        return array[start - origin : stop - origin]


class IntegrityBackend(BackendWrapper):
    """Knows a checksum of everything that was written through it, and compares it with what is read.

    A read that does not match is completed with a :class:`CorruptedDataError`. Bytes that were never written through it
    pass. Checksums are computed where the inner backend completes its transfers, not where they are submitted.

    Args:
        inner: The backend that does the work.
        page_bytes: Bytes per checksum; fewer are used if the inner backend's boundaries ask for it.
        boundary_bytes: Have requests end at multiples of this many bytes if the inner backend does not care: requests
            that are cut at the same places whenever they are made seldom cover a part of a page. Multiple of 4096.
    """

    def __init__(self, inner: IOBackend, page_bytes: int = PAGE_BYTES, boundary_bytes: int = 0) -> None:
        super().__init__(inner)
        for name, value in (("page_bytes", page_bytes), ("boundary_bytes", boundary_bytes)):
            if value % ALIGNMENT or value < 0 or not page_bytes:
                raise ArgumentError(f"{name} must be a positive multiple of {ALIGNMENT}, got {value}")
        self.boundary_bytes = inner.boundary_bytes or boundary_bytes
        # A page is read back in one request, which must not cross a boundary.
        self.page_bytes = math.gcd(page_bytes, inner.boundary_bytes)
        """Bytes per checksum."""
        self._table = ChecksumTable(inner.capacity_bytes, self.page_bytes)
        self._lock = threading.RLock()  # guards all that follows, and the table
        self._changed = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._preparing: set[_Job] = set()  # what is still read back for
        if not is_fast():
            logger.warning("checksums are computed in Python, which is slow; reinstall google-crc32c from its wheel")

    def describe(self) -> str:
        """Return one line for logs."""
        return f"crc32c of every {self.page_bytes} bytes over {self.inner.describe()}"

    def checksums(self) -> dict[str, npt.NDArray[Any]]:
        """Return all checksums, for `restore`; no write may be on its way."""
        with self._lock:
            return self._table.dump()

    def restore(self, checksums: Mapping[str, npt.NDArray[Any]]) -> None:
        """The inner backend holds what had these checksums. No request may be on its way."""
        with self._lock:
            self._table.load(checksums)

    def submit(self, request: IORequest) -> None:
        """Pass the request on, and verify or remember its bytes when it is over."""
        if not len(request.memory):
            self.inner.submit(request)
            return
        job = _Job(request, self.inner.block_bytes, self._table)
        if not job.edges:
            self._transfer(job)
            return
        try:
            with self._lock:
                self._preparing.add(job)
                for page in job.edges:  # see [Note: partial segments]
                    known = [
                        each
                        for each in self._table.segments(page)
                        if each.checksum is not None and job.is_cutting(each)
                    ]
                    if known:
                        job.to_read.append((known[0].start, known[-1].stop))
            self._advance(job)
        except BaseException:  # a KeyboardInterrupt, say: then close must not wait for it
            self._is_prepared(job)
            raise

    def close(self, timeout_seconds: float) -> bool:
        """Let requests go on for which something is read back, and close the inner backend."""
        started = time.monotonic()
        with self._lock:
            wait_in_parts(lambda seconds: self._changed.wait_for(lambda: not self._preparing, seconds), timeout_seconds)
        # At least half of it, also of a process that was stopped.
        return self.inner.close(max(timeout_seconds / 2, timeout_seconds - (time.monotonic() - started)))

    # -- the way of a request ----------------------------------------------------------------------------------------

    def _advance(self, job: _Job) -> None:
        """Read back what is still missing, then carry out the request itself."""
        if job.to_read:
            start, stop = job.to_read.pop()
            array = AlignedRegion(stop - start).array()
            job.read_back[start // self.page_bytes] = (start, array)
            address: int = array.__array_interface__["data"][0]
            self.inner.submit(IORequest(Direction.READ, start, array.data, address, partial(self._on_read_back, job)))
            return
        with self._lock:
            if job.request.direction is Direction.WRITE:
                for page in job.edges:
                    self._cut(job, page)
        self._transfer(job)
        self._is_prepared(job)

    def _is_prepared(self, job: _Job) -> None:
        with self._lock:
            self._preparing.discard(job)
            self._changed.notify_all()

    def _on_read_back(self, job: _Job, request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        if error is None and transferred_bytes == len(request.memory):
            try:
                self._advance(job)
                return
            except Exception as found:  # no memory for one more page: whoever waits must hear of it
                error = as_os_error(found)
        self._is_prepared(job)
        job.request.complete(0, error)  # without an error this is a short transfer, to be tried again

    def _transfer(self, job: _Job) -> None:
        outer, on_complete = job.request, partial(self._on_transferred, job)
        self.inner.submit(
            IORequest(outer.direction, outer.offset, outer.memory, outer.address, on_complete, outer.may_pad)
        )

    def _on_transferred(self, job: _Job, inner: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        inner.release_memory()
        try:
            if job.request.direction is Direction.WRITE:
                self._remember(job, transferred_bytes if error is None else 0)
            elif error is None:
                transferred_bytes = self._verify(job, transferred_bytes)
        except Exception as found:  # whoever waits must hear of it
            transferred_bytes, error = 0, as_os_error(found)
        job.request.complete(transferred_bytes, error)

    # -- checksums ---------------------------------------------------------------------------------------------------

    def _cut(self, job: _Job, page: int) -> None:
        """Take what a write is about to change out of a page, and give what stays of cut segments new checksums."""
        kept: list[Segment] = []
        for segment in self._table.segments(page):
            if not job.is_cutting(segment):
                kept.append(segment)
                continue
            is_right = self._is_right(job, page, segment)
            inside = [address for address in job.cuts if segment.start < address < segment.stop]
            for start, stop in pairwise(sorted({segment.start, *inside, segment.stop})):
                checksum = crc32c(job.bytes_on_drive(page, start, stop)) if is_right else None
                kept.append(Segment(start, stop, checksum))
        low, high = job.drops
        self._table.replace(page, [each for each in kept if each.stop <= low or high <= each.start])

    def _is_right(self, job: _Job, page: int, segment: Segment) -> bool:
        if segment.checksum is None:
            return False
        if crc32c(job.bytes_on_drive(page, segment.start, segment.stop)) == segment.checksum:
            return True
        file, offset = self.locate(segment.start)
        num_bytes = segment.stop - segment.start
        logger.error("%d bytes at %d of %s are damaged, which a write beside them found", num_bytes, offset, file)
        return False

    def _remember(self, job: _Job, written_bytes: int) -> None:
        """Note the checksums of what was written; of the rest of a failed or short write, nothing is known."""
        start, stop = job.start, job.stop
        array = np.frombuffer(job.request.memory, dtype=np.uint8)
        if written_bytes < stop - start:
            with self._lock:
                for page in self._table.pages(start, stop):
                    if page not in job.edges:  # there, _cut has done it
                        self._table.replace(page, ())
            # The next attempt starts at the last whole block, and should not find a segment cut there.
            stop = max(start, (start + written_bytes) // ALIGNMENT * ALIGNMENT)
        size = self.page_bytes
        first, last = -(-start // size), stop // size
        whole = [crc32c(array[page * size - start : (page + 1) * size - start]) for page in range(first, last)]
        ends = {(start, min(stop, first * size)), (max(start, last * size), stop)}
        parts = [Segment(low, high, crc32c(array[low - start : high - start])) for low, high in ends if low < high]
        with self._lock:
            self._table.replace_whole(first, whole)
            for segment in parts:
                self._table.add(segment)

    def _verify(self, job: _Job, read_bytes: int) -> int:
        """Return how many of the bytes that were read are verified: all of them, unless the transfer was short.

        Raises:
            CorruptedDataError: They are not what was written.
        """
        start, stop = job.start, job.start + read_bytes
        array = np.frombuffer(job.request.memory, dtype=np.uint8)
        size = self.page_bytes
        first, last = -(-start // size), stop // size
        with self._lock:
            whole = self._table.whole(first, last) if first < last else None
            ranges = [(start, stop)] if whole is None else [(start, first * size), (last * size, stop)]
            segments = [segment for low, high in ranges for segment in self._table.segments_in(low, high)]
        for page, expected in enumerate(whole or (), first):
            if crc32c(array[page * size - start : (page + 1) * size - start]) != expected:
                raise CorruptedDataError(page * size, size)
        for low, high, checksum in segments:
            if high > stop and stop < job.stop:
                return max(low, start) - start
            if checksum is None:
                raise CorruptedDataError(low, high - low)
            pieces = [array[max(low, start) - start : min(high, stop) - start]]
            if low < start:
                pieces.insert(0, job.bytes_on_drive(low // size, low, start))
            if high > stop:
                pieces.append(job.bytes_on_drive(low // size, stop, high))
            if crc32c(*pieces) != checksum:
                raise CorruptedDataError(low, high - low)
        return read_bytes
