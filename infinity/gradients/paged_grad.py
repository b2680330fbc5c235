"""A gradient that is a tensor like any other to look at, and is fetched when something is computed with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.torch_internals.names import make_subclass, without_torch_function
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
            _replace(*args)
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


def _replace(gradient: PagedGradient, values: torch.Tensor) -> None:
    """``gradient.data = values``."""
    if values.shape != gradient.shape:
        raise ValueError(f"a gradient of shape {tuple(gradient.shape)} cannot get data of shape {tuple(values.shape)}")
    gradient.detach().copy_(values)


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
