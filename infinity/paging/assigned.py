"""What was assigned to a parameter's ``.data``: torch makes the two one, the engine takes a copy."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import AccessError
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


class AssignedData:
    """What was assigned to the ``.data`` of parameters, by FQN."""

    def __init__(self) -> None:
        self._assigned: dict[str, Assigned] = {}
        self._fqn_at: dict[tuple[int, int], str] = {}
        """(Storage, offset) where assigned values begin, see `place_of` -> FQN. Finds the weight behind another tensor
        over the same memory."""

    def of(self, fqn: str) -> Assigned | None:
        """What was assigned to a parameter last."""
        return self._assigned.get(fqn)

    def add(self, fqn: str, values: torch.Tensor) -> None:
        """``values`` were assigned to a parameter."""
        assigned = self._assigned[fqn] = Assigned(values)
        self._fqn_at[assigned.place] = fqn

    def owner_of(self, values: torch.Tensor) -> str | None:
        """The parameter to which a tensor over the same memory was assigned; None if there is none."""
        fqn = self._fqn_at.get(place_of(values))
        return None if fqn is None or self._assigned[fqn].is_gone else fqn

    def forget(self, fqn: str) -> None:
        """A parameter has other values from now on."""
        known = self._assigned.pop(fqn, None)
        if known is not None and self._fqn_at.get(known.place) == fqn:
            del self._fqn_at[known.place]

    def check(self) -> None:
        """Raise if one of them has been written to since: in torch the weight would have changed.

        Raises:
            AccessError: once for each such write.
        """
        for fqn, assigned in list(self._assigned.items()):
            if assigned.is_gone:
                self.forget(fqn)
            elif assigned.is_written:
                self.forget(fqn)
                raise AccessError.of_data(fqn)
