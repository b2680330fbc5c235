"""What was assigned to a parameter's ``.data``: torch makes the two one, the engine takes a copy.

Knows one such tensor and its memory; must not know the parameter.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.numerics.raw_bytes import checksum, raw_bytes


class Assigned:
    """Such a tensor, as it was then. It is not kept alive."""

    def __init__(self, values: torch.Tensor) -> None:
        self._tensor = weakref.ref(values)
        self._version = values._version
        self._memory = StorageWeakRef(values.untyped_storage())
        self._lies = _lies(values)
        self.place = place_of(values)
        self._checksum = _checksum(values)

    @property
    def is_gone(self) -> bool:
        """Whether nobody has its memory any more."""
        return bool(self._memory.expired())

    @property
    def is_written(self) -> bool:
        """Whether it has been written to since, as far as torch counts that: another tensor may have its memory, too."""
        tensor = self._tensor()
        return tensor is not None and tensor._version != self._version

    def shows_the_weight(self, values: torch.Tensor) -> bool:
        """Whether ``values``, assigned once more, would have the weight of now in torch: the same memory, as it was."""
        return (
            not self.is_gone
            and self._memory == StorageWeakRef(values.untyped_storage())
            and self._lies == _lies(values)
            and self._checksum == _checksum(values)
        )


def place_of(values: torch.Tensor) -> tuple[int, int]:
    """Where its first element lies: another tensor that begins there has the same memory, as long as both are alive."""
    return StorageWeakRef(values.untyped_storage()).cdata, int(values.storage_offset())


def _lies(values: torch.Tensor) -> tuple[object, ...]:
    return values.dtype, tuple(values.shape), values.stride(), values.storage_offset()


def _checksum(values: torch.Tensor) -> int:
    return checksum(raw_bytes(values.detach().resolve_conj().resolve_neg().cpu()))
