"""Checksums of what was written, by address.

[Note: segments]
The address space is cut into pages of equal size. A page holds segments: ranges that were written in one piece, or what
is left of such a range, each with its crc32c. Segments are sorted and do not overlap. Bytes between them were never
written.

    page 0 of 64 KiB    [0 ------------------------------------ 64)   written whole: one segment
    write 8 to 24 KiB   [0 -- 8) [8 ------ 24) [24 ------------ 64)   three segments, each with a checksum of its own

Large requests write whole pages, which leaves one segment per page. These take five bytes each, in two arrays: 76 MB
per TB. Only other pages have a list of segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from swapper.errors import ArgumentError

# Large enough that a checksum's time is spent in C and not in Python; small enough that it costs little to read a page
# back because a request covers a part of it.
PAGE_BYTES = 64 << 10

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """Bytes ``[start, stop)`` of the address space and their checksum; ``None`` if they are known to be damaged."""

    start: int
    stop: int
    checksum: int | None


def crc32c(*pieces: Bytes, after: int = 0) -> int:
    """Return the checksum of contiguous arrays, as if they were one. It holds the interpreter lock: keep them short.

    ``after``: the checksum of the bytes before them.
    """
    checksum = after
    for piece in pieces:
        checksum = google_crc32c.extend(checksum, piece)
    return checksum


def is_fast() -> bool:
    """Whether the processor's instruction computes checksums, and not a loop in Python."""
    return bool(google_crc32c.implementation == "c")


class ChecksumTable:
    """The checksums of an address space; see [Note: segments]. Not thread safe: `IntegrityBackend` locks."""

    def __init__(self, capacity_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.page_bytes = page_bytes
        num_pages = -(-capacity_bytes // page_bytes)
        # np.zeros maps pages that take memory when they are first written: a large address space is cheap until then.
        self._checksums = np.zeros(num_pages, dtype=np.uint32)
        self._is_whole = np.zeros(num_pages, dtype=np.bool_)  # one segment covers the page: `_checksums` has its crc32c
        self._others: dict[int, tuple[Segment, ...]] = {}  # by page: the segments of all other pages with any

    def bounds(self, page: int) -> tuple[int, int]:
        """Return the first address of a page and the one behind its last."""
        start = page * self.page_bytes
        return start, min(start + self.page_bytes, self.capacity_bytes)

    def pages(self, start: int, stop: int) -> range:
        """Return the pages that hold ``[start, stop)``."""
        return range(start // self.page_bytes, -(-stop // self.page_bytes))

    def segments(self, page: int) -> Sequence[Segment]:
        """Return the segments of a page, in order."""
        if self._is_whole[page]:
            return (Segment(*self.bounds(page), int(self._checksums[page])),)
        return self._others.get(page, ())

    def segments_in(self, start: int, stop: int) -> Iterator[Segment]:
        """Give the segments that hold bytes of ``[start, stop)``, in order."""
        for page in self.pages(start, stop):
            for segment in self.segments(page):
                if segment.start < stop and start < segment.stop:
                    yield segment

    def whole(self, first: int, stop: int) -> list[int] | None:
        """Return the checksums of the pages ``[first, stop)``, or ``None`` if one of them is not one segment."""
        return self._checksums[first:stop].tolist() if self._is_whole[first:stop].all() else None

    def replace_whole(self, first: int, checksums: Sequence[int]) -> None:
        """Set the checksums of pages that were written whole, from page ``first`` on."""
        stop = first + len(checksums)
        self._checksums[first:stop] = checksums
        self._is_whole[first:stop] = True
        if self._others:
            for page in range(first, stop):
                self._others.pop(page, None)

    def replace(self, page: int, segments: Sequence[Segment]) -> None:
        """Set the segments of a page; they must be sorted and must not overlap."""
        # A damaged segment (checksum None) stays in the list: the array has no value for it.
        whole = segments[0].checksum if len(segments) == 1 and segments[0][:2] == self.bounds(page) else None
        self._is_whole[page] = whole is not None
        if whole is not None:
            self._checksums[page] = whole
        if segments and whole is None:
            self._others[page] = tuple(segments)
        else:
            self._others.pop(page, None)

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """Return all checksums, for `load`."""
        rows = [  # int64, so that -1 for "damaged" is no crc32c
            (segment.start, segment.stop, -1 if segment.checksum is None else segment.checksum)
            for segments in self._others.values()
            for segment in segments
        ]
        return {
            "checksums": self._checksums.copy(),
            "is_whole": np.packbits(self._is_whole),
            "segments": np.array(rows, dtype=np.int64).reshape(-1, 3),
        }

    def load(self, known: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace all checksums by those that `dump` returned."""
        is_whole = np.unpackbits(known["is_whole"], count=self._is_whole.size).astype(np.bool_)
        if known["checksums"].shape != self._checksums.shape:
            raise ArgumentError(f"checksums of {known['checksums'].size} pages, not of {self._checksums.size}")
        self._checksums[:], self._is_whole[:] = known["checksums"], is_whole
        self._others = {}
        for start, stop, checksum in known["segments"].tolist():
            self.add(Segment(start, stop, None if checksum < 0 else checksum))

    def add(self, segment: Segment) -> None:
        """Add a segment inside one page. It must not overlap others."""
        page = segment.start // self.page_bytes
        self.replace(page, sorted((*self.segments(page), segment)))
