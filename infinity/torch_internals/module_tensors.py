"""Reports tensors that replace parameters without being registered: conversions, deep copies, lazy parameters.

`Init` needs to know them: ``model.half()`` makes a new tensor for each parameter, which has to be put on the drives
too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

_installed: list[tuple[Any, str, Any, Any]] = []
"""Class, name of a method, the method as it was, and ours."""


def announce_made_tensors(announce: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
    """Call ``announce(made, source)`` from now on for each tensor that replaces ``source`` in a module or is its deep
    copy.

    A lazy parameter that gets its shape has no source. A second call changes nothing.
    """
    if _installed:
        return
    # UninitializedTensorMixin: it defines `materialize` for lazy parameters and lazy buffers, and torch does not export
    # it.
    lazy: Any = UninitializedParameter.__mro__[1]
    plain_apply: Any = nn.Module._apply
    plain_copy: Any = nn.Parameter.__deepcopy__
    plain_materialize: Any = lazy.materialize

    @functools.wraps(plain_apply)
    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        # `_apply` calls itself for children with the same `fn`, which is wrapped once.
        is_wrapped = isinstance(fn, functools.partial) and fn.func is _announced
        return plain_apply(self, fn if is_wrapped else functools.partial(_announced, fn, announce), recurse)

    @functools.wraps(plain_copy)
    def __deepcopy__(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo  # a tied parameter is copied once
        copy = plain_copy(self, memo)
        if is_new:
            announce(copy, self)
        return copy

    @functools.wraps(plain_materialize)
    def materialize(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_materialize(self, *args, **kwargs)
        announce(self, None)

    _replace(nn.Module, "_apply", _apply)
    _replace(nn.Parameter, "__deepcopy__", __deepcopy__)
    _replace(lazy, "materialize", materialize)


def announce_nothing() -> None:
    """Undo `announce_made_tensors`."""
    while _installed:
        owner, name, plain, ours = _installed.pop()
        # If another library has wrapped our function since, removing it would remove theirs too. It stays, and is
        # harmless.
        if vars(owner)[name] is ours:
            setattr(owner, name, plain)


def _announced(fn: Any, announce: Callable[[torch.Tensor, torch.Tensor | None], None], tensor: torch.Tensor) -> Any:
    """Call ``fn``, which ``Module._apply`` applies to each tensor, and announce a new result."""
    made = fn(tensor)
    if made is not tensor and isinstance(made, torch.Tensor) and isinstance(tensor, nn.Parameter):
        announce(made, tensor)
    return made


def _replace(owner: Any, name: str, ours: Any) -> None:
    _installed.append((owner, name, vars(owner)[name], ours))
    setattr(owner, name, ours)
