"""Memory that the processes of one machine share: what they exchange goes through it, not through sockets.

Knows processes and memory; must not know what is exchanged, or with what.

[Note: turns] Each process has two blocks that the others read where they lie. In each turn it writes one of them, then tells the
others, which then read it; in the next turn it takes the other one. Who tells of a turn has read what was told in the one
before. So when all have told of a turn, nobody reads what lies in the blocks of the one before, and they are written anew.

A block has no name in any file system: it is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_HEAD_BYTES = mmap.PAGESIZE
"""Before the blocks, with the number by which others see that it is the right memory."""
_ELSEWHERE = (0, 0, 0, 0)


class SharedBlocks:
    """This process's two blocks, and those of the others on its machine. Used by one thread at a time."""

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes``: of a block, which takes memory as it is written. Where none can be shared, it is private."""
        self._num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._turn = 0
        self._others: dict[int, torch.Tensor] = {}
        self._fd = -1
        self.place = _ELSEWHERE
        """What others need to know of it: which machine, process, number there, and a number that is its own."""
        total = _HEAD_BYTES + 2 * self._num_bytes
        try:
            self._fd = os.memfd_create("infinity-blocks")
            os.ftruncate(self._fd, total)
            place = _machine(), os.getpid(), self._fd, secrets.randbits(62)
            self._own = _map(place, total)
            self._own[:8].view(torch.int64).fill_(place[-1])
            self.place = place
        except (AttributeError, OSError, RuntimeError):  # not Linux, or no more files or memory
            self._own = torch.empty(total, dtype=torch.uint8, device="cpu")

    def open(self, places: Sequence[tuple[int, ...]]) -> list[bool]:
        """Open the blocks of others, by rank (this one's among them). Returns whose it could."""
        for rank, place in enumerate(places):
            if place == self.place or place[0] != self.place[0]:
                continue
            try:
                memory = _map(place, self._own.numel())
            except (OSError, RuntimeError):
                logger.debug("rank %d's memory cannot be opened here; gloo sends instead", rank, exc_info=True)
                continue
            if int(memory[:8].view(torch.int64)) == place[-1]:
                self._others[rank] = memory
        return [rank in self._others for rank in range(len(places))]

    def close_file(self) -> None:
        """Nobody opens it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def forget(self, ranks: Collection[int]) -> None:
        """These could not open this one's: what is shared is shared both ways."""
        self._others = {rank: memory for rank, memory in self._others.items() if rank not in ranks}

    def begin(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next turn's block, 1-D, to be written and then told of."""
        num_bytes = numel * dtype.itemsize
        if num_bytes > self._num_bytes:
            raise ValueError(f"{num_bytes} bytes, and a block has {self._num_bytes}")
        self._turn += 1
        start = _HEAD_BYTES + self._turn % 2 * self._num_bytes
        return self._own[start : start + num_bytes].view(dtype)

    def word(self, what: str, row: torch.Tensor) -> torch.Tensor:
        """By which this turn's ``row`` is told, the same on both sides."""
        numbers = [self._turn, row.numel() * row.element_size(), zlib.crc32(what.encode())]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def theirs(self, rank: int, own: torch.Tensor, numel: int) -> torch.Tensor | None:
        """Of another one's block, what begins where ``own`` begins in this one's; until the next turn. None: it is not shared."""
        if rank not in self._others:
            return None
        start = own.storage_offset() * own.element_size()
        return self._others[rank][start : start + numel * own.element_size()].view(own.dtype)


def _map(place: tuple[int, ...], num_bytes: int) -> torch.Tensor:
    path = f"/proc/{place[1]}/fd/{place[2]}"
    if os.stat(path).st_size != num_bytes:
        raise OSError("this is something else")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")


def _machine() -> int:
    """The same for processes that see each other's numbers, and not in another container or network."""
    names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return int.from_bytes(hashlib.sha256("".join([text, *names]).encode()).digest()[:7], "little")
