"""Which parameter of a model lies where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.layout import Slot
from infinity.units.parameter import PagedView
from infinity.units.unit import Unit


class ParameterMap:
    """A model's parameters, and the unit and slot of each."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.units = list(units)
        self.places: dict[int, tuple[Unit, Slot]] = {
            id(parameter): (unit, slot)
            for unit in units
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
        }

    def locate(self, parameter: torch.Tensor) -> tuple[Unit, Slot]:
        """The unit and slot of a parameter of the model.

        Raises:
            ModelError: it is not one of the model's.
        """
        place = self.places.get(id(parameter))
        if place is None:
            raise ModelError(
                f"a tensor of shape {tuple(parameter.shape)} is not a parameter of the engine's model. Pass one of "
                "engine.module.parameters()"
            )
        return place

    def locate_any(self, tensor: torch.Tensor) -> tuple[Unit, Slot]:
        """The same for a parameter, or a view that stands for one or for a part of it."""
        return (tensor.place.unit, tensor.place.slot) if isinstance(tensor, PagedView) else self.locate(tensor)

    def holds(self, parameter: object) -> bool:
        """Whether this is a parameter of the model."""
        return id(parameter) in self.places

    def parameters_now(self) -> dict[int, nn.Parameter]:
        """The parameters that the model's modules have now, by ``id``, in the order of ``model.parameters()``."""
        # As that does, but ten times as fast: it is asked for in every forward.
        found: dict[int, Any] = {}
        seen: set[int] = set()
        rest: list[nn.Module | None] = [self.model]
        while rest:
            module = rest.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module._parameters.values():
                found[id(parameter)] = parameter  # again: it keeps its place
            rest += reversed(module._modules.values())
        found.pop(id(None), None)  # of modules without a bias, say
        return found

    def num_owners(self) -> dict[tuple[int, int], int]:
        """(unit index, slot index) -> how many modules have the parameter as their own."""
        owners: dict[tuple[int, int], int] = {}
        for module in self.model.modules():
            for parameter in {id(p): p for p in module.parameters(recurse=False) if self.holds(p)}.values():
                unit, slot = self.locate(parameter)
                owners[unit.index, slot.index] = owners.get((unit.index, slot.index), 0) + 1
        return owners
