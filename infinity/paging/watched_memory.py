"""The memory of a model's open weights, watched: see [Note: uncounted writes] in ``infinity.torch_internals.foreign_writes``.

Knows which parameter's memory a tensor looks at; must not know how it is noticed that somebody asks for it.
"""

from __future__ import annotations

import torch

from infinity.errors import UnsupportedModelError
from infinity.paging.residency import Residency
from infinity.torch_internals.modes import has_memory
from infinity.torch_internals.names import as_plain
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class WatchedMemory:
    """The `Watcher` of an engine."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def before_write(self, tensor: torch.Tensor) -> None:
        """What it is now may be needed then."""
        if (place := self._place_of(tensor)) is not None:
            self._residency.remember(*place)

    def after_write(self, tensor: torch.Tensor) -> None:
        """Autograd, which minds other writes between forward and backward, does not mind these."""
        if (place := self._place_of(tensor)) is not None:
            place[0].note_written([place[1].index])

    def before_exposure(self, tensor: torch.Tensor) -> None:
        """Not on a GPU: there each launch of a kernel asks for addresses, nearly always to read."""
        place = self._place_of(tensor)
        if place is not None and tensor.device.type == "cpu":
            unit, slot = place
            self._residency.remember(unit, slot)
            unit.expose(slot)

    def before_storage_write(self, address: int) -> None:
        """Refused: that would be memory of other parameters as well."""
        unit = self._residency.unit_at(address)
        if unit is not None:
            raise UnsupportedModelError(
                f"the storage of a parameter was to be written to as such, in which all of unit {unit.name} lies",
                cure="Write to the parameter: parameter.data.fill_(...), .copy_(...) or [...] = ...",
            )

    def _place_of(self, tensor: torch.Tensor) -> tuple[Unit, Slot] | None:
        """The open unit, and the parameter in it, whose memory any tensor looks at."""
        with as_plain():
            if tensor.layout is not torch.strided or not has_memory(tensor):
                return None
            try:
                unit = self._residency.unit_behind(tensor)
            except RuntimeError:  # it has no memory, or may not be asked
                return None
            if unit is None or not unit.is_bound:
                return None
            slot = unit.slot_at(int(tensor.storage_offset()) * tensor.itemsize)
            return None if slot is None else (unit, slot)
