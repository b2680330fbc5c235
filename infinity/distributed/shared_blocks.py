"""Memory that the processes of one machine share: what they exchange goes through it, not through sockets.

Knows memory and the lines between those processes; must not know what is exchanged.

[Note: turns] Each process has two blocks that the others read where they lie. In each turn it writes one of them, then tells the
others, which then read it; in the next turn it takes the other one. Who tells of a turn has read what was told in the one
before. So when all have told of a turn, nobody reads what lies in the blocks of the one before, and they are written anew.

A block has no name in any file system: it is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Mapping

import torch

from infinity.distributed.lines import Lines

logger = logging.getLogger(__name__)

_WORD = struct.Struct("qqq")
_YES, _NO = b"\1", b"\0"


class SharedBlocks:
    """This process's two blocks, and those of the others on its machine. Used by one thread at a time."""

    def __init__(self, num_bytes: int, lines: Lines) -> None:
        """Share them with those at the other ends of ``lines``, who all do so.

        Args:
            num_bytes: of a block, which takes memory as it is written. Where none can be shared, it is private.
            lines: to whom turns are told. Nothing else may be told meanwhile.
        """
        self._num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._turn = 0
        self._lines = lines
        total = 2 * self._num_bytes
        file = -1
        try:
            file = os.memfd_create("infinity-blocks")
            os.ftruncate(file, total)
            self._own = _map(file, total)
            files = [file]
        except (AttributeError, OSError, RuntimeError):  # not Linux, or no more files or memory
            logger.debug("no memory can be shared; it is sent instead", exc_info=True)
            self._own = torch.empty(total, dtype=torch.uint8, device="cpu")
            files = []
        try:
            for rank in lines:
                lines.tell(rank, _YES, files)
        finally:
            if file >= 0:
                os.close(file)
        found = {rank: _opened(*lines.hear_files(rank), total) for rank in lines}
        for rank, memory in found.items():
            lines.tell(rank, _NO if memory is None else _YES)
        answers = lines.hear(found)  # what is shared is shared both ways
        self._others = {rank: memory for rank, memory in found.items() if memory is not None and answers[rank] == _YES}

    def begin(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next turn's block, 1-D, to be written and then told of."""
        num_bytes = numel * dtype.itemsize
        if num_bytes > self._num_bytes:
            raise ValueError(f"{num_bytes} bytes, and a block has {self._num_bytes}")
        self._turn += 1
        start = self._turn % 2 * self._num_bytes
        return self._own[start : start + num_bytes].view(dtype)

    def tell(self, rank: int, what: str, row: torch.Tensor) -> None:
        """In this turn's block lies this ``row`` for that rank."""
        self._lines.tell(rank, self._word(what, row))

    def hear(self, what: str, rows: Mapping[int, torch.Tensor]) -> list[int]:
        """Wait until those ranks have told of such rows. Returns who has come with something else."""
        told = self._lines.hear(rows)
        return [rank for rank, row in rows.items() if told[rank] != self._word(what, row)]

    def _word(self, what: str, row: torch.Tensor) -> bytes:
        return _WORD.pack(self._turn, row.numel() * row.element_size(), zlib.crc32(what.encode()))

    def theirs(self, rank: int, own: torch.Tensor, numel: int) -> torch.Tensor | None:
        """Of another one's block, what begins where ``own`` begins in this one's; until the next turn. None: it is not shared."""
        if rank not in self._others:
            return None
        start = own.storage_offset() * own.element_size()
        return self._others[rank][start : start + numel * own.element_size()].view(own.dtype)


def _opened(message: bytes, files: list[int], num_bytes: int) -> torch.Tensor | None:
    """The memory of the one that came, if any did and it can be had; all are closed."""
    memory = None
    for file in files:
        with contextlib.suppress(OSError, RuntimeError):
            memory = _map(file, num_bytes)
        os.close(file)
    if message != _YES:
        raise OSError("it came with something else")
    return memory


def _map(file: int, num_bytes: int) -> torch.Tensor:
    """All of a file that is as long."""
    if os.fstat(file).st_size != num_bytes:
        raise OSError("this is something else")
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
