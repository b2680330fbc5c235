"""A backend that detects when a drive returns other bytes than were written.

[Note: partial segments]
A checksum covers all bytes of its segment (see :mod:`swapper.wrappers.checksum`). So a read of a part of a segment also
needs the rest. A write into a segment must first verify the rest, because the rest gets a new checksum. In both cases
the segment is read back first. Large requests that are always cut at the same places seldom need that.

Requests need no locks against each other. Before a write is passed on, the bytes that it will change leave their
segment. So the bytes of a segment in the table never change, and bytes that were read back stay valid while others
write.

A write of partial blocks also rewrites the rest of the blocks at its two ends (see ``IOBackend.block_bytes``). If it
fails, that rest may be torn. So segments are cut at the ends of these blocks, too, and bytes behind them stay readable.
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
from swapper.sync.limits import wait_in_parts
from swapper.wrappers.base import BackendWrapper
from swapper.wrappers.checksum import PAGE_BYTES, Bytes, ChecksumTable, Segment, crc32c, is_fast

logger = logging.getLogger(__name__)


class _Job:
    """One request on its way, and the bytes that were read back for it.

    Attributes:
        start, stop: The range of its addresses. Their checksums are forgotten once a write has begun.
        cuts: Addresses at which segments have to end.
        edges: Pages of which the request covers a part, at most two.
        to_read: Ranges to be read back before the transfer.
        read_back: By page, the first address and the bytes of such a range.
    """

    # Example: blocks of 4 KiB, pages of 64 KiB, page 0 written whole. A write of bytes [100, 5000):
    #   edges = (0,), cuts = (0, 8192, 100, 5000), to_read = [(0, 65536)]
    # The page is read back and verified. Its segments are then [0, 100), [5000, 8192) and [8192, 65536); the write adds
    # [100, 5000). A write of [4096, 65536) would have cuts = (4096, 65536).

    __slots__ = ("cuts", "edges", "read_back", "request", "start", "stop", "to_read")

    def __init__(self, request: IORequest, block_bytes: int, table: ChecksumTable) -> None:
        self.request = request
        self.start = start = request.offset
        self.stop = stop = start + len(request.memory)
        self.cuts: tuple[int, ...] = (start, stop)
        if request.direction is Direction.WRITE and (start | stop) % block_bytes:
            last_stop = min(round_up(stop, block_bytes), table.capacity_bytes)
            self.cuts = (start // block_bytes * block_bytes, last_stop, start, stop)
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
    """Keeps a checksum of all bytes that are written through it, and verifies reads.

    A read that does not match completes with a :class:`CorruptedDataError`. Bytes that were never written through it
    pass.

    Args:
        inner: The backend that does the work.
        page_bytes: Bytes per checksum; fewer if the inner backend's boundaries require it.
        boundary_bytes: Where requests are cut if the inner backend has no boundaries, so that they seldom cover a part
            of a page. Multiple of 4096.
    """

    def __init__(self, inner: IOBackend, page_bytes: int = PAGE_BYTES, boundary_bytes: int = 0) -> None:
        super().__init__(inner)
        for name, value in (("page_bytes", page_bytes), ("boundary_bytes", boundary_bytes)):
            if value % ALIGNMENT or value < 0 or not page_bytes:
                raise ArgumentError(f"{name} must be a positive multiple of {ALIGNMENT}, got {value}")
        self.boundary_bytes = inner.boundary_bytes or boundary_bytes
        # A page is read back in one request, which must not cross a boundary. gcd(n, 0) = n: without boundaries.
        self.page_bytes = math.gcd(page_bytes, inner.boundary_bytes)
        """Bytes per checksum."""
        self._table = ChecksumTable(inner.capacity_bytes, self.page_bytes)
        self._lock = threading.RLock()  # guards the table and _preparing; never held while a request is submitted
        self._changed = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        self._preparing: set[_Job] = set()  # jobs with bytes to be read back; close() waits for them
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
        """Take these checksums for the bytes of the inner backend. No request may be on its way."""
        with self._lock:
            self._table.load(checksums)

    def submit(self, request: IORequest) -> None:
        """Pass the request on, and verify or remember its bytes when it is over."""
        if not len(request.memory):
            self.inner.submit(request)
            return
        job = _Job(request, self.inner.block_bytes, self._table)
        if not job.edges:  # whole pages: nothing is read back
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
            self._end_preparation(job)
            raise

    def close(self, timeout_seconds: float) -> bool:
        """Wait until all jobs have read back what they need, and close the inner backend."""
        started = time.monotonic()
        with self._lock:
            # After its reads, a job submits one more request: the inner backend must still be open.
            wait_in_parts(lambda seconds: self._changed.wait_for(lambda: not self._preparing, seconds), timeout_seconds)
        # At least half of the timeout, also if the process was stopped meanwhile.
        return self.inner.close(max(timeout_seconds / 2, timeout_seconds - (time.monotonic() - started)))

    # -- the steps of a request, from one completion to the next -----------------------------------------------------

    def _advance(self, job: _Job) -> None:
        """Read back what is still missing, then carry out the request itself."""
        if job.to_read:  # its completion comes back here, for the other edge or for the request
            start, stop = job.to_read.pop()
            array = AlignedRegion(stop - start).array()  # at most one page
            job.read_back[start // self.page_bytes] = (start, array)
            address: int = array.__array_interface__["data"][0]
            self.inner.submit(IORequest(Direction.READ, start, array.data, address, partial(self._on_read_back, job)))
            return
        with self._lock:
            if job.request.direction is Direction.WRITE:
                for page in job.edges:
                    self._cut(job, page)
        self._transfer(job)
        self._end_preparation(job)

    def _end_preparation(self, job: _Job) -> None:
        with self._lock:
            self._preparing.discard(job)
            self._changed.notify_all()

    def _on_read_back(self, job: _Job, request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        if error is None and transferred_bytes == len(request.memory):
            try:
                self._advance(job)
                return
            except Exception as found:  # no memory for one more page, say: the waiter must get the error
                error = as_os_error(found)
        self._end_preparation(job)
        job.request.complete(0, error)  # without an error this is a short transfer, to be tried again

    def _transfer(self, job: _Job) -> None:
        outer, on_complete = job.request, partial(self._on_transferred, job)
        self.inner.submit(IORequest(outer.direction, outer.offset, outer.memory, outer.address, on_complete))

    def _on_transferred(self, job: _Job, inner: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        inner.release_memory()
        # Checksums are computed here, on the thread that completed the transfer: submit() must not take long.
        try:
            if job.request.direction is Direction.WRITE:
                self._remember(job, transferred_bytes if error is None else 0)
            elif error is None:
                transferred_bytes = self._verify(job, transferred_bytes)
        except Exception as found:  # also the CorruptedDataError of _verify
            transferred_bytes, error = 0, as_os_error(found)
        job.request.complete(transferred_bytes, error)

    # -- checksums ---------------------------------------------------------------------------------------------------

    def _cut(self, job: _Job, page: int) -> None:
        """Remove the bytes that a write will change from a page, and give the rest of cut segments new checksums."""
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
        self._table.replace(page, [each for each in kept if each.stop <= job.start or job.stop <= each.start])

    def _is_right(self, job: _Job, page: int, segment: Segment) -> bool:
        if segment.checksum is None:
            return False
        if crc32c(job.bytes_on_drive(page, segment.start, segment.stop)) == segment.checksum:
            return True
        file, offset = self.locate(segment.start)
        num_bytes = segment.stop - segment.start
        logger.error("%d bytes at offset %d of %s are damaged; a write next to them found it", num_bytes, offset, file)
        return False

    def _remember(self, job: _Job, written_bytes: int) -> None:
        """Store the checksums of written bytes, and forget those of the rest of a failed or short write."""
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
        # What is in front of the whole pages, and behind them. A set: inside of one page both are the same. Bytes 8 to
        # 24 KiB give first = 1 and last = 0, and twice (8 KiB, 24 KiB).
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
            # The usual case, all pages whole, makes no Segment objects but for the two ends.
            whole = self._table.whole(first, last) if first < last else None
            ranges = [(start, stop)] if whole is None else [(start, first * size), (last * size, stop)]
            segments = [segment for low, high in ranges for segment in self._table.segments_in(low, high)]
        for page, expected in enumerate(whole or (), first):
            if crc32c(array[page * size - start : (page + 1) * size - start]) != expected:
                raise CorruptedDataError(page * size, size)
        for low, high, checksum in segments:
            if high > stop and stop < job.stop:  # a short read ends in this segment: only bytes before it are verified
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
