"""Weights at rest in host memory, for a device with a memory of its own.

Knows bytes and copies; must not know when anything is needed.
"""

from __future__ import annotations

import torch

from infinity.device.compute import ComputeDevice, Fence, FlatBuffer
from infinity.units.unit import Arrival
from swapper import AlignedRegion


class HostWeights:
    """One unit's weights at rest in host memory, laid out like its flat buffer, for a device with a memory of its own."""

    def __init__(self, num_bytes: int, device: ComputeDevice) -> None:
        self._device = device
        self._region = AlignedRegion(num_bytes)
        self._unpin = device.pin(self._region.address, self._region.num_bytes) if device.pin is not None else None
        self.tensor: torch.Tensor | None = torch.from_numpy(self._region.array())
        self._fence: Fence = None

    def fetch(self, flat: FlatBuffer) -> Arrival:
        """Start the copy into ``flat``."""
        self._fence = self._device.upload(flat.tensor(), self.present, self._device.mark())
        return _Copied(self._device, self._fence)

    @property
    def present(self) -> torch.Tensor:
        """uint8, the whole block."""
        if self.tensor is None:
            raise RuntimeError("the memory of the weights has been released")
        return self.tensor

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Replace bytes from ``offset`` on by those of ``source`` (host memory), when no copy reads them any more."""
        self._device.synchronize(self._fence)
        raw = source.view(torch.uint8)
        self.present[offset : offset + raw.numel()].copy_(raw)

    def release(self) -> None:
        """Give the memory back, when no copy reads it any more."""
        self._device.synchronize(self._fence)
        if self._unpin is not None:
            self._unpin()
        self.tensor = None
        self._region.release()


class _Copied:
    """Weights that a copy brings, in the order of the device's streams."""

    def __init__(self, device: ComputeDevice, fence: Fence) -> None:
        self._device = device
        self._fence = fence

    def wait(self) -> None:
        self._device.compute_waits_for(self._fence)

    def done(self) -> bool:
        return True

    def promote(self) -> None: ...
