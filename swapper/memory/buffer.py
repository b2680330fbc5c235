"""The memory of a tensor, an array or any other buffer, as bytes that a transfer can use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapper.errors import ArgumentError

Buffer = Any
"""A contiguous CPU tensor of any dtype, a contiguous numpy array, or an object with the buffer protocol."""

_EMPTY = np.empty(0, dtype=np.uint8)
BYTE = _EMPTY.dtype


def bytes_of(buffer: Buffer, *, for_read: bool) -> npt.NDArray[np.uint8]:
    """Return a flat uint8 array that shares the memory of ``buffer`` and keeps it alive.

    Args:
        buffer: See :data:`Buffer`.
        for_read: The transfer will store into the memory, so it must be writable.

    Raises:
        ArgumentError: Not contiguous, not in host memory, not writable, or no memory at all.
    """
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise ArgumentError(
                f"a tensor on device {str(buffer.device)!r} cannot be transferred; "
                "copy it to host memory, for instance a staging buffer"
            )
        if buffer.layout is not torch.strided or not buffer.is_contiguous():
            raise ArgumentError(
                f"a tensor of shape {tuple(buffer.shape)} that is not contiguous cannot be transferred; "
                "pass .contiguous() memory"
            )
        if buffer.numel() == 0:
            return _EMPTY
        try:
            flat = buffer.detach().view(-1)  # .numpy() refuses a tensor that requires a gradient
            found: npt.NDArray[np.uint8] = (flat if buffer.dtype is torch.uint8 else flat.view(torch.uint8)).numpy()
        except (RuntimeError, TypeError) as error:  # a lazily conjugated or negated tensor
            raise ArgumentError(f"a {buffer.dtype} tensor cannot be seen as bytes: {error}") from error
        return found
    if isinstance(buffer, np.ma.MaskedArray):
        raise ArgumentError("the mask of a MaskedArray would be lost; pass its .data and its .mask in two calls")
    name = type(buffer).__name__
    try:
        # asarray() makes a plain array of a subclass: np.matrix would stay two-dimensional after reshape(-1).
        array = np.asarray(buffer if isinstance(buffer, np.ndarray) else memoryview(buffer))
    except (TypeError, ValueError, BufferError) as error:
        raise ArgumentError(
            f"a {name} has no memory to transfer; pass a CPU tensor, a numpy array or a bytearray"
        ) from error
    if array.dtype.hasobject:
        raise ArgumentError(
            f"a {name} of objects has no bytes of its own, only references to them; pass an array of numbers"
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(f"a {name} that is not contiguous cannot be transferred; copy it first")
    if for_read and not array.flags.writeable:
        raise ArgumentError(f"a read cannot store into a {name} that is read-only; pass a writable one")
    return array.reshape(-1).view(np.uint8) if array.nbytes else _EMPTY
