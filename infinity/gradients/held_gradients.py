"""Tensors that the user holds as gradients, and that keep their values when the gradients become others."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from infinity.gradients.paged_grad import PagedGradient
from infinity.torch_internals.names import num_owners
from infinity.units.layout import Slot
from infinity.units.unit import Unit

Key = tuple[int, int]
"""Unit index, slot index."""


class HeldGradient:
    """A tensor of the user's that is a parameter's gradient, and has been copied to where gradients wait."""

    def __init__(self, unit: Unit, slot: Slot, tensor: torch.Tensor, *, is_new: bool = False) -> None:
        """``is_new``: it is going to be delivered."""
        self.unit = unit
        self.slot = slot
        self.tensor = tensor
        self.on_delivered()
        self.is_new = is_new

    @property
    def has_moved(self) -> bool:
        """Whether its ``data`` was assigned since `on_delivered`."""
        return self.tensor.data_ptr() != self._address

    @property
    def may_have_changed(self) -> bool:
        """Whether it was written to since `on_delivered`, or may have been."""
        # torch counts writes in `_version`, but neither those by ``.data`` nor those of GradScaler's kernels: so
        # whoever got the tensor by ``parameter.grad`` may have written to it.
        return self.was_shown or self.has_moved or self.tensor._version != self._version

    def on_delivered(self) -> None:
        """Its values are known, and it has been delivered."""
        self.is_new = False
        self._version = self.tensor._version
        self._address = self.tensor.data_ptr()
        self.was_shown = False
        """Whether ``parameter.grad`` has given it since."""

    def show(self) -> torch.Tensor:
        """The tensor, for ``parameter.grad``."""
        self.was_shown = True
        return self.tensor

    @property
    def is_held_by_others(self) -> bool:
        """Whether anybody else can see it, or write to it."""
        tensor: Any = self.tensor  # torch does not declare the counter, which counts views
        # 3 references: `self.tensor`, the variable above and the argument of getrefcount. In C++ one owner is the
        # Python object; views and graphs are further ones.
        return bool(tensor.requires_grad or sys.getrefcount(tensor) > 3 or tensor._use_count() > 1)

    @property
    def is_shared(self) -> bool:
        """Whether anybody else can see its memory, or write to it: through a tensor that it is a view of, say."""
        if self.is_held_by_others:
            return True
        storage = self.tensor.untyped_storage()
        # One is the tensor's, one this variable's. Memory that is not torch's (numpy's) is counted by nobody.
        return bool(num_owners(storage) > 2 or not storage.resizable())


class HeldGradients:
    """Tensors that scripts may hold as gradients. As in torch, ``parameter.grad`` is one object while it is held.

    `given`: stand-ins that read it at the first look; `views`: of memory; `own`: the script's tensors.
    """

    def __init__(self) -> None:
        self.given: dict[Key, weakref.ref[PagedGradient]] = {}
        """Stand-ins that ``parameter.grad`` has returned. Each reads its gradient at the first look."""
        self.views: dict[Key, HeldGradient] = {}
        """Views of gradients in memory that ``parameter.grad`` has returned. Held strongly: only a look at the tensor
        shows that its ``data`` was assigned."""
        self.own: dict[Key, HeldGradient] = {}
        """Gradients that are tensors of the user's: assigned by him, or with a graph (``create_graph=True``)."""

    def given_for(self, key: Key) -> torch.Tensor | None:
        """The tensor that stands for the gradient, if there is one."""
        if key in self.views:
            return self.views[key].tensor
        reference = self.given.get(key)
        return reference() if reference is not None else None

    def own_of(self, key: Key) -> HeldGradient | None:
        """The tensor of the user's that is the gradient, if there is one."""
        if key in self.views and self.views[key].has_moved:
            self.own[key] = self.views.pop(key)
        return self.own.get(key)

    def detach(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """These gradients will be others, or none: what the user holds of them keeps the values that it has."""
        for slot in slots:
            key = unit.index, slot.index
            self.own.pop(key, None)
            view = self.views.pop(key, None)
            if view is not None and view.is_held_by_others:
                # As in torch after `zero_grad()`: the tensor stays the user's, with memory of its own from here on.
                view.tensor.data = view.tensor.clone()
            reference = self.given.pop(key, None)
            paged = reference() if reference is not None else None
            if paged is not None:
                paged.materialize(torch.clone(paged))  # fetched now, because its values are about to be replaced
