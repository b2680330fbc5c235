"""Tensors that scripts hold as gradients: they keep their values when the gradients become others."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.torch_internals.names import make_subclass, num_owners, without_torch_function
from infinity.torch_internals.operations import (
    AS_ARRAY,
    EXPOSING,
    METADATA,
    leaves,
    name_of,
    replaced,
    unit_by_unit,
    writes_unseen,
)
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class PagedGradient(torch.Tensor):
    """What ``parameter.grad`` is while the gradient lies elsewhere than in memory, or nobody may write to it yet.

    Metadata is answered at once. Any other operation gets the values, as an ordinary tensor over the memory into which they
    were fetched; what it changes there is the gradient from then on. Lists of gradients (``torch._foreach_norm`` and the
    like, which clipping uses) are gone through one by one, so that they need not be in memory together: that gives the same
    bits, as those functions treat every tensor by itself.
    """

    _fetch: Callable[[], torch.Tensor]
    _on_change: Callable[[], None]
    _replace: Callable[[torch.Tensor], None]
    _consistent: torch.Tensor | None = None

    @staticmethod
    def of(
        shape: Sequence[int],
        dtype: torch.dtype,
        fetch: Callable[[], torch.Tensor],
        on_change: Callable[[], None],
        replace: Callable[[torch.Tensor], None],
    ) -> PagedGradient:
        """
        Args:
            shape, dtype: of the gradient, which is on the CPU.
            fetch: gives a tensor over the values, of the parameter's strides, which stays valid as long as it is held.
            on_change: the values have been changed, or may be without anybody noticing.
            replace: makes a tensor the parameter's gradient in place of this one.
        """
        # One NaN, expanded: shape and dtype without memory. Code that reads past __torch_function__ gets NaN, not wrong
        # numbers.
        nothing = torch.full((), float("nan"), dtype=dtype, device="cpu").expand(tuple(shape))
        gradient: PagedGradient = make_subclass(PagedGradient, nothing)
        gradient._fetch = fetch
        gradient._on_change = on_change
        gradient._replace = replace
        return gradient

    def materialize(self, values: torch.Tensor) -> None:
        """From now on this is ``values``, whatever becomes of the parameter's gradient."""
        self._consistent = values
        self._fetch = lambda: values
        self._on_change = lambda: None

    def in_memory(self) -> torch.Tensor:
        """The values as an ordinary tensor, which is the parameter's gradient from now on, and which this stands for.

        Whoever makes it the gradient of another parameter, too, has one tensor for both, as in torch.
        """
        if self._consistent is None:
            values = torch.clone(self)
            self._replace(values)
            self.materialize(values)
            return values
        return self._consistent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:  # shape, dtype, device, ...: answered by the expanded tensor, nothing is fetched
            with without_torch_function():
                return func(*args, **kwargs)
        if func == _ASSIGNING_DATA:
            gradient, values = args
            if values.shape != gradient.shape:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} cannot get data of shape {tuple(values.shape)}"
                )
            gradient.detach().copy_(values)
            return None
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
        # One tensor after the other, so that one at a time is in memory. These functions treat each by itself.
        if name_of(func).startswith(("_foreach_", "_amp_foreach_")) and lists and len(lists[0]) > 1:
            apart = itertools.count()
            found = unit_by_unit(func, args, kwargs, lambda _: next(apart))
            if found is not None:
                return found[0]
        return _with_values(func, args, kwargs)


_ASSIGNING_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _with_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    opened: dict[int, tuple[PagedGradient, torch.Tensor, int]] = {}

    def values_of(leaf: Any) -> Any:
        if not isinstance(leaf, PagedGradient):
            # The same gradient twice in a call is one tensor twice, as in torch: `g.add_(g)` sees its own writes.
            return leaf
        if id(leaf) not in opened:
            values = leaf._fetch()
            opened[id(leaf)] = leaf, values, values._version
        return opened[id(leaf)][1]

    args, kwargs = replaced(args, values_of), replaced(kwargs, values_of)
    result = None
    try:
        result = func(*args, **kwargs)
    finally:
        # Also after an error: an operation in place may have written a part.
        places = {values.untyped_storage().data_ptr() for _, values, _ in opened.values()}
        # Whoever gets memory (`.numpy()`, `.data_ptr()`, views) can write to it later, which no version counts.
        is_exposed = (
            name_of(func) in EXPOSING | AS_ARRAY
            or writes_unseen(func)
            or any(_lies_in(leaf, places) for leaf in leaves(result))
        )
        for gradient, values, version in opened.values():
            if is_exposed or values._version != version:
                gradient._on_change()
    originals = {id(values): gradient for gradient, values, _ in opened.values()}
    if any(id(leaf) in originals for leaf in leaves(result)):  # an operation in place gives back what it got
        return replaced(result, lambda leaf: originals.get(id(leaf), leaf))
    return result


def _lies_in(value: Any, addresses: set[int]) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not isinstance(value, PagedGradient)
        and value.untyped_storage().data_ptr() in addresses
    )


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
        return self.was_shown or self.has_moved or self._version is None or self.tensor._version != self._version

    def on_delivered(self) -> None:
        """Its values are known, and it has been delivered."""
        self.is_new = False
        # Of a tensor that was made in inference mode, torch counts no writes.
        self._version = None if self.tensor.is_inference() else self.tensor._version
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
