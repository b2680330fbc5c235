"""A device with memory of its own, played by the CPU: for tests of what goes through pages."""

from __future__ import annotations

import torch

from tests.internals import ComputeDevice, Copy, Fence


class SeparateHostDevice(ComputeDevice):
    """The CPU treated as if its memory were a GPU's: everything goes through pages."""

    uses_host_memory = False

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        first = self.stamp()
        target.copy_(source)
        self._copies.append(Copy("upload", source.nbytes, first, self.stamp()))
        return None

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> None:
        first = self.stamp()
        target.copy_(source)
        self._copies.append(Copy("download", source.nbytes, first, self.stamp()))
