"""Pinned host memory into which tensors are copied from the device while nobody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from infinity.device.compute import ComputeDevice, Fence
from swapper import AlignedRegion

_GRANULE = 64
"""Bytes to which each tensor is aligned: a cache line, and enough for any dtype's `view`."""

Purpose = TypeVar("Purpose")


@dataclass(eq=False)
class Download(Generic[Purpose]):
    """Tensors on their way to the host."""

    purpose: Purpose
    values: list[torch.Tensor]
    """1-D views of the ring. They hold the sources' values once `is_first_done` is True or `await_first` has
    returned."""
    begin: int
    end: int
    """Byte offsets in the ring."""
    fence: Fence


class DownloadRing(Generic[Purpose]):
    """A ring buffer of downloads, first in, first out. Its caller waits for the first one if `fits` says that there is
    no room.

    A popped download's memory may be reused at once.
    """

    def __init__(self, device: ComputeDevice, num_bytes: int) -> None:
        """
        Args:
            device: the source of the downloads.
            num_bytes: size of the ring; 0 if the device computes in host memory, and nothing is downloaded.
        """
        self._device = device
        self.num_bytes = num_bytes // _GRANULE * _GRANULE
        self._region: AlignedRegion | None = None
        self._unpin: Callable[[], None] | None = None
        self.open()
        self.coming: deque[Download[Purpose]] = deque()
        """Downloads in the order of `start`, until `pop_first`."""
        self._last: Fence = None
        """Fence of the newest download."""

    def open(self) -> None:
        """Allocate the memory, at the beginning and after `close`."""
        if self._region is None and self.num_bytes:
            self._region = AlignedRegion(self.num_bytes)
            # Without pinning, a copy would go through a buffer of the driver's and block the thread that launches it.
            if self._device.pin is not None:
                self._unpin = self._device.pin(self._region.address, self._region.num_bytes)

    def fits(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether `start` would find room for them now."""
        return self._place(_bytes_of(sources)) is not None

    def start(self, sources: Sequence[torch.Tensor], purpose: Purpose) -> None:
        """Copy 1-D tensors of the device, as the calling thread's stream leaves them, without waiting. They must fit.

        Nothing may write to them any more. They may be freed: their memory is not handed out again before the copy has run.
        """
        begin = self._place(_bytes_of(sources))
        if begin is None or self._region is None:
            raise RuntimeError(f"no room for {_bytes_of(sources)} bytes in a ring of {self.num_bytes}")
        # `after`: the sources are complete when the compute stream reaches this point.
        offset, values, after = begin, [], self._device.mark()
        for source in sources:
            values.append(self._view_at(offset, source))
            self._last = self._device.download(values[-1], source, after)
            offset += _round_up(source.nbytes)
        # Empty tensors take a granule as well: two downloads that begin at one place would look like a full ring.
        self.coming.append(Download(purpose, values, begin, max(offset, begin + _GRANULE), self._last))

    def is_first_done(self) -> bool:
        """Whether the oldest download has ended."""
        return self._device.is_done(self.coming[0].fence)

    def await_first(self) -> None:
        """Wait until the oldest download has ended."""
        self._device.synchronize(self.coming[0].fence)

    def pop_first(self) -> Download[Purpose]:
        """Remove the oldest download, even if it has not ended. The next `start` may reuse its memory."""
        return self.coming.popleft()

    def blocks(self, source: torch.Tensor, most_numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Download a 1-D tensor that is larger than the ring, block by block. Waits for each block.

        Args:
            source: the tensor. No other download may be under way.
            most_numel: elements of a block.

        Yields:
            Index of the block's first element, and its values, which are valid until the next block is asked for.
        """
        # Two halves take turns: with a ring of 128 KiB and fp32, blocks of 16,384 elements at bytes 0, 65,536, 0,
        # 65,536, ... The caller asks for the next block when it is done with the last one, so block 2 may overwrite
        # block 0. Meanwhile block 1 is waited for.
        half = self.num_bytes // (2 * _GRANULE) * _GRANULE
        step = min(half // source.element_size(), most_numel)
        if step == 0 or self.coming:
            raise RuntimeError(
                f"a ring of {self.num_bytes} bytes, with {len(self.coming)} on their way, takes no block"
            )
        after = self._device.mark()
        on_its_way: deque[tuple[int, torch.Tensor, Fence]] = deque()

        def first() -> tuple[int, torch.Tensor]:
            start, values, fence = on_its_way.popleft()
            self._device.synchronize(fence)
            return start, values

        for number, start in enumerate(range(0, source.numel(), step)):
            block = source[start : start + step]
            values = self._view_at(half * (number % 2), block)
            self._last = self._device.download(values, block, after)
            on_its_way.append((start, values, self._last))
            if len(on_its_way) == 2:  # the one is used while the other comes
                yield first()
        while on_its_way:
            yield first()

    def close(self) -> None:
        """Wait for all copies, and free the memory."""
        region, self._region = self._region, None
        self.coming.clear()
        if region is None:
            return
        # All downloads run on one stream, so the last fence covers the others.
        self._device.synchronize(self._last)
        if self._unpin is not None:
            self._unpin()
        region.release()

    def _place(self, num_bytes: int) -> int | None:
        """Offset at which ``num_bytes`` fit now; None: no room."""
        # A ring of 1024 bytes. A takes [0, 512), B takes [512, 896).
        #   256 more: neither behind B (128 left) nor before A (0 left): None, until A has been popped.
        #   A popped: C takes [0, 256), before B. Now the ring is wrapped: C, the last, begins before B, the first.
        #   256 more: D takes [256, 512), up to B. 64 more: None, until B has been popped.
        if not self.coming:
            return 0 if num_bytes <= self.num_bytes else None
        first, last = self.coming[0], self.coming[-1]
        is_wrapped = last.begin < first.begin
        if last.end + num_bytes <= (first.begin if is_wrapped else self.num_bytes):
            return last.end
        return 0 if not is_wrapped and num_bytes <= first.begin else None

    def _view_at(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        if self._region is None:
            raise RuntimeError("there is no memory to land in")
        memory = torch.from_numpy(self._region.array())
        return memory[offset : offset + like.nbytes].view(like.dtype)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE) * _GRANULE


def _bytes_of(sources: Sequence[torch.Tensor]) -> int:
    return max(sum(_round_up(source.nbytes) for source in sources), _GRANULE)
