"""Bytes on a drive that tell where they belong and which write put them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swapper.config import ALIGNMENT

_SECTOR_BYTES = 512
_WORDS = _SECTOR_BYTES // 8
_SECTORS_PER_BLOCK = ALIGNMENT // _SECTOR_BYTES
_GENERATION_SHIFT = 40  # below it the number of the sector: enough for 512 TiB
_SECTOR_MASK = (1 << _GENERATION_SHIFT) - 1
_MAX_GENERATION = (1 << 64 - _GENERATION_SHIFT) - 1  # then it starts over, at 1
_UNKNOWN = 0

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileRange:
    """Contiguous bytes of one file, in multiples of 4096."""

    file_index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first sector that is not as it was written.

    Attributes:
        file_index: In which file.
        offset: Its first byte there.
        detail: What it holds instead, in words.
    """

    file_index: int
    offset: int
    detail: str


class CheckedPattern:
    """Knows what each block of some files should hold; must not know how the bytes get there.

    Every sector of 512 bytes begins with eight bytes that hold its number, counted over all files, and the generation:
    the number of the write that stored it. The rest is noise that no drive can compress, the same in every block. So
    bytes that are old, torn, changed or in the wrong place are found; marking a buffer costs little, because only the
    first words change. Not thread safe.

    Args:
        file_bytes: Sizes of the files, in multiples of 4096.
    """

    def __init__(self, file_bytes: Sequence[int]) -> None:
        starts = np.cumsum([0, *file_bytes]) // ALIGNMENT
        self._first_blocks = [int(start) for start in starts[:-1]]
        self._generations = np.full(int(starts[-1]), _UNKNOWN, np.uint32)
        self._last_generation = 0
        noise = np.random.default_rng(20).integers(0, 1 << 64, (_SECTORS_PER_BLOCK, _WORDS), np.uint64)
        noise[:, 0] = 0
        self._noise = noise

    def fill(self, memory: Memory) -> None:
        """Store the noise in all of a buffer; :meth:`mark` then needs to change little of it."""
        _sectors(memory).reshape(-1, _SECTORS_PER_BLOCK, _WORDS)[:] = self._noise

    def mark(self, memory: Memory, ranges: Sequence[FileRange]) -> int:
        """Number the sectors of a filled buffer that is about to be written; return the generation.

        Until :meth:`confirm`, nobody knows what these blocks of the files hold.
        """
        self._last_generation = self._last_generation % _MAX_GENERATION + 1
        self._set(ranges, _UNKNOWN)
        first = 0
        stamps = _sectors(memory)[:, 0]
        for span in ranges:
            num_sectors = span.num_bytes // _SECTOR_BYTES
            stamp = self._first_sector(span) | self._last_generation << _GENERATION_SHIFT
            stamps[first : first + num_sectors] = np.arange(stamp, stamp + num_sectors, dtype=np.uint64)
            first += num_sectors
        return self._last_generation

    def confirm(self, ranges: Sequence[FileRange], generation: int) -> None:
        """Note that a write has ended well."""
        self._set(ranges, generation)

    def check(self, memory: Memory, ranges: Sequence[FileRange]) -> Mismatch | None:
        """Compare what was read with what was written last; blocks of unknown content are left out."""
        first = 0
        for span in ranges:
            sectors = _sectors(memory[first : first + span.num_bytes])
            first += span.num_bytes
            wrong = self._find_wrong(sectors, span)
            if wrong is not None:
                return self._describe(sectors[wrong], span, wrong)
        return None

    def _find_wrong(self, sectors: npt.NDArray[np.uint64], span: FileRange) -> int | None:
        generations = np.repeat(self._of(span), _SECTORS_PER_BLOCK).astype(np.uint64)
        start = self._first_sector(span)
        expected = np.arange(start, start + len(sectors), dtype=np.uint64)
        expected |= generations << np.uint64(_GENERATION_SHIFT)
        is_wrong = sectors[:, 0] != expected
        blocks = sectors.reshape(-1, _SECTORS_PER_BLOCK, _WORDS)
        is_wrong |= (blocks[:, :, 1:] != self._noise[None, :, 1:]).any(axis=2).reshape(-1)
        is_wrong &= generations != _UNKNOWN
        return int(is_wrong.argmax()) if is_wrong.any() else None

    def _describe(self, sector: npt.NDArray[np.uint64], span: FileRange, index: int) -> Mismatch:
        offset = span.offset + index * _SECTOR_BYTES
        expected = int(self._of(span)[index // _SECTORS_PER_BLOCK])
        stamp = int(sector[0])
        number, generation = stamp & _SECTOR_MASK, stamp >> _GENERATION_SHIFT
        noise = self._noise[index % _SECTORS_PER_BLOCK]
        if not np.array_equal(sector[1:], noise[1:]):
            num_wrong = int((sector[1:] != noise[1:]).sum()) * 8
            detail = f"about {num_wrong} of its {_SECTOR_BYTES} bytes are something else than was written"
        elif number != self._first_sector(span) + index:
            detail = f"it holds what was written {(number - self._first_sector(span) - index) * _SECTOR_BYTES} bytes on"
        else:
            detail = f"it holds write number {generation} instead of number {expected}"
        return Mismatch(span.file_index, offset, detail)

    def _first_sector(self, span: FileRange) -> int:
        return (self._first_blocks[span.file_index] * ALIGNMENT + span.offset) // _SECTOR_BYTES

    def _of(self, span: FileRange) -> npt.NDArray[np.uint32]:
        start = self._first_blocks[span.file_index] + span.offset // ALIGNMENT
        return self._generations[start : start + span.num_bytes // ALIGNMENT]

    def _set(self, ranges: Sequence[FileRange], generation: int) -> None:
        for span in ranges:
            self._of(span)[:] = generation


def _sectors(memory: Memory) -> npt.NDArray[np.uint64]:
    return memory.view(np.uint64).reshape(-1, _WORDS)
