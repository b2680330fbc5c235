"""Checksums of what was written, by address.

[Note: segments]
The address space is cut into pages of equal size, and each page holds segments: ranges that were written in one piece, or
what is left of such a range, with the crc32c of their bytes. Segments of a page are sorted and do not overlap; bytes
between them were never written, and nothing is known of them. A write that covers whole pages, which is nearly all that
happens when requests are large, leaves one segment per page: those cost five bytes of memory each, in arrays. Only
pages with other segments have a list of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from swapper.errors import ArgumentError

PAGE_BYTES = 64 << 10
"""Of pages this long, the time that a checksum takes is the processor's, not Python's, and a page read a second time
because a request covers a part of it costs little."""

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """Bytes ``[start, stop)`` of the address space and their checksum; ``None`` if they are known to be damaged."""

    start: int
    stop: int
    checksum: int | None


def crc32c(*pieces: Bytes, after: int = 0) -> int:
    """Return the checksum of contiguous arrays, as if they were one. It holds the interpreter lock: keep them short.

    ``after``: the checksum of what stands before them.
    """
    checksum = after
    for piece in pieces:
        checksum = google_crc32c.extend(checksum, piece)
    return checksum


def is_fast() -> bool:
    """Whether the processor's instruction computes checksums, and not a loop in Python."""
    return bool(google_crc32c.implementation == "c")


class ChecksumTable:
    """Knows the checksums of the written bytes of an address space; must not know where the bytes lie. Its owner locks.

    See [Note: segments].
    """

    def __init__(self, capacity_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.page_bytes = page_bytes
        num_pages = -(-capacity_bytes // page_bytes)
        # Memory that is not touched costs nothing, so a large address space is cheap until it is used.
        self._checksums = np.zeros(num_pages, dtype=np.uint32)
        self._is_whole = np.zeros(num_pages, dtype=np.bool_)
        self._others: dict[int, tuple[Segment, ...]] = {}

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
        """Change what is known of pages that were written whole: their checksums, from page ``first`` on."""
        stop = first + len(checksums)
        self._checksums[first:stop] = checksums
        self._is_whole[first:stop] = True
        if self._others:
            for page in range(first, stop):
                self._others.pop(page, None)

    def replace(self, page: int, segments: Sequence[Segment]) -> None:
        """Change what is known of a page; ``segments`` must be sorted and must not overlap."""
        if len(segments) == 1 and segments[0][:2] == self.bounds(page) and segments[0].checksum is not None:
            self._checksums[page] = segments[0].checksum
            self._is_whole[page] = True
            self._others.pop(page, None)
            return
        self._is_whole[page] = False
        if segments:
            self._others[page] = tuple(segments)
        else:
            self._others.pop(page, None)

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that is known, for `load`."""
        rows = [
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
        """Know what `dump` returned, and nothing else."""
        is_whole = np.unpackbits(known["is_whole"], count=self._is_whole.size).astype(np.bool_)
        if known["checksums"].shape != self._checksums.shape:
            raise ArgumentError(f"checksums of {known['checksums'].size} pages, not of {self._checksums.size}")
        self._checksums[:], self._is_whole[:] = known["checksums"], is_whole
        self._others = {}
        for start, stop, checksum in known["segments"].tolist():
            self.add(Segment(start, stop, None if checksum < 0 else checksum))

    def add(self, segment: Segment) -> None:
        """Take in a segment, inside one page, where nothing is known."""
        page = segment.start // self.page_bytes
        self.replace(page, sorted((*self.segments(page), segment)))
