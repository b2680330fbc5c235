"""Host memory that is released while the engine sleeps, if its contents can be put aside."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.tiers.user_copies import PutAside
from swapper import AlignedRegion


class HostBlock:
    """An anonymous mapping. It is zeros, which take no memory until they are written."""

    def __init__(self, num_bytes: int, pin: Callable[[int, int], Callable[[], None] | None] | None = None) -> None:
        """``pin``: see `ComputeDevice.pin`."""
        self._num_bytes = num_bytes
        self._pin = pin
        self._tensor: torch.Tensor | None = None
        self._map()

    def _map(self) -> None:
        self._region = region = AlignedRegion(self._num_bytes)
        # Pinned, so that the GPU copies without help of the CPU. `pin` returns None if the driver refuses: copies are
        # slower then.
        self._unpin = self._pin(region.address, region.num_bytes) if self._pin is not None else None
        self._tensor = torch.from_numpy(region.array())

    @property
    def tensor(self) -> torch.Tensor:
        """The whole block, uint8, 1-D."""
        if self._tensor is None:
            raise RuntimeError("the memory has been released")
        return self._tensor

    def release_memory(self, put_aside: PutAside) -> None:
        """Move the contents elsewhere until `take_memory_back`, if ``put_aside`` takes them. `tensor` has them there."""
        aside = None if self._region.is_released else put_aside(self.tensor)
        if aside is not None:
            self.release()
            self._tensor = aside

    def take_memory_back(self) -> None:
        """The counterpart of `release_memory`."""
        if self._region.is_released and self._tensor is not None:
            aside = self._tensor
            self._map()
            self._tensor.copy_(aside)

    def release(self) -> None:
        """Release the memory."""
        if self._unpin is not None:
            self._unpin()  # before the region is unmapped: the driver must not keep addresses of others' memory
        self._unpin = self._tensor = None
        self._region.release()
