"""Bytes in the memory of a GPU, for backends that can transfer them without a detour."""

from __future__ import annotations

from typing import cast

import torch

from swapper.errors import InvalidBufferError


class DeviceBytes:
    """Knows bytes in device memory, where they start, and the tensor that keeps them; never touches them.

    It can be cut and measured like a ``memoryview``, which is all that lies between a swapper and its backend do with memory.

    Args:
        tensor: Contiguous, on any device.

    Attributes:
        address: Of the first byte, as the device's driver knows it.
    """

    __slots__ = ("_tensor", "address")

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise InvalidBufferError(
                f"a tensor of shape {tuple(tensor.shape)} that is not contiguous cannot be transferred; "
                "pass .contiguous() memory"
            )
        self._tensor = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach().view(-1)
        self.address = self._tensor.data_ptr()

    def __len__(self) -> int:
        return self._tensor.numel()

    def __getitem__(self, span: slice) -> DeviceBytes:
        return DeviceBytes(self._tensor[span])

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self)

    @property
    def data(self) -> memoryview:
        """Itself, under the type that requests have for memory: only a backend that knows better gets to see it."""
        return cast(memoryview, self)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self._tensor.device
