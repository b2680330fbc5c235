"""Tensors on drives: ordinary torch tensors over memory-mapped files (`swapper.volumes.mapped_memory`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.errors import StorageError
from infinity.torch_internals.large_results import LargeResults
from infinity.torch_internals.names import num_owners, outside_modes
from swapper.errors import VolumeError, VolumeTooSmallError
from swapper.volumes import mapped_memory
from swapper.volumes.mapped_memory import MappedMemory

LEAST_BYTES = 16 << 10
"""Smaller tensors stay in memory: a few pages of a drive would cost more than they save."""


class DriveTensors:
    """Makes tensors in files of some directories. A tensor's space is freed with its last view."""

    def __init__(self, directories: Sequence[Path] | MappedMemory) -> None:
        """``directories``: on the drives of the config; they must exist. Or the memory itself."""
        self._memory = directories if isinstance(directories, MappedMemory) else MappedMemory(directories)

    @outside_modes
    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A CPU tensor of a shape and dtype, on a drive if it is large, without defined values.

        Args:
            shape: of the tensor.
            dtype: any.
            stride: of a dense tensor in any order of dimensions, in elements. None: row-major.

        Raises:
            StorageError: the directory has too little room, or the drive fails; the message names directory and bytes.
        """
        size = torch.Size(shape)
        num_bytes = size.numel() * dtype.itemsize
        # The meta device computes row-major strides without memory.
        steps = stride if stride is not None else torch.empty(size, dtype=dtype, device="meta").stride()
        if num_bytes < LEAST_BYTES:
            return torch.empty_strided(size, steps, dtype=dtype, device="cpu")
        with explained():
            array = self._memory.allocate(num_bytes)
        # The storage keeps the array alive, and the array its part of the file.
        storage = torch.from_numpy(array).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, size, steps)

    def like(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape, dtype and (if dense) strides of ``source`` (on any device), without defined values."""
        return self.empty(source.shape, source.dtype, stride=source.stride() if is_dense(source) else None)

    @outside_modes
    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> bool:
        """Move the memory of a CPU tensor to a drive. It stays the same object with the same values.

        Returns:
            False if another tensor shares the memory: nothing is moved, and you may try again later. True otherwise,
            also if there is nothing to move (small, on a drive already, on another device, not dense).
        """
        # Assigning `.data` makes an inference tensor unusable in torch. With gaps between its elements, a copy would
        # have other strides.
        if tensor.device.type != "cpu" or not is_dense(tensor) or tensor.is_inference():
            return True
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < LEAST_BYTES or on_drive(tensor):
            return True
        storage = tensor.untyped_storage()
        # Two owners are expected: the tensor, and the variable `storage`. More are other tensors over this memory,
        # which would not see later writes. What NumPy, a file or another process has made is not resizable: there,
        # others may look at it uncounted.
        if not storage.resizable() or num_owners(storage) > 2:
            return False
        made = self.like(tensor)
        source, place = _bytes_of(tensor), _bytes_of(made)
        # Pages that were never written are zeros on both sides: `torch.empty` of a large model costs no copy.
        for start, stop in mapped_memory.touched(tensor.data_ptr(), num_bytes):
            place[start:stop].copy_(source[start:stop])
        # The last references but the tensor's own: the assignment below then frees the old memory at once.
        del storage, source
        tensor.data = made
        return True


def large_results_on(directories: Sequence[Path]) -> contextlib.AbstractContextManager[Any]:
    """Inside the ``with`` block, large results of this thread's CPU operations are stored in files of
    ``directories``."""
    if not directories:
        return contextlib.nullcontext()
    tensors = DriveTensors(directories)
    return LargeResults(LEAST_BYTES, lambda num_bytes: tensors.empty((num_bytes,), torch.uint8))


@outside_modes
def drives_of(tensor: torch.Tensor) -> DriveTensors | None:
    """The `DriveTensors` that a tensor's memory belongs to; None if it is ordinary memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    memory = mapped_memory.owner_of(tensor.data_ptr())
    return DriveTensors(memory) if memory is not None else None


def on_drive(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is in a file of a `DriveTensors`."""
    return drives_of(tensor) is not None


def has_drive_tensors() -> bool:
    """Whether there is any tensor on drives."""
    return mapped_memory.is_in_use()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has no gaps and no overlaps, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    # shape (2, 3, 4) with strides (12, 1, 3): sorted (1, 3), (3, 4), (12, 2). Each stride must be the product of the
    # sizes before it: 1, then 1 * 3 = 3, then 3 * 4 = 12. Dimensions of size 1 may have any stride.
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def write_out() -> None:
    """Write what is new in tensors on drives to the files, and release its memory.

    Raises:
        StorageError: a drive fails.
    """
    with explained():
        mapped_memory.write_out()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Volume errors inside the ``with`` block become the `StorageError` that users know."""
    try:
        yield
    except VolumeError as error:
        problem, cure = f"cannot hold the model's parameters: {error}", "Look at the drive, or choose another one"
        if isinstance(error, VolumeTooSmallError):
            needed = f"{error.needed_bytes} bytes are needed for the next one, and {error.free_bytes} are free"
            problem = f"is too small for the model's parameters: {needed}"
            cure = "Free some space, or choose another nvme_path"
        raise StorageError(error.directory, problem, cure=cure) from error


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, in its order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def zeros_on(directories: Sequence[Path], numel: int) -> torch.Tensor:
    """Zeros in fp32, 1-D: in files of ``directories``, or, without any, in memory."""
    if not directories:
        return torch.zeros(numel, dtype=torch.float32, device="cpu")
    return DriveTensors(directories).empty((numel,), torch.float32).zero_()
