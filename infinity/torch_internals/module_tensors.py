"""Where modules get tensors that they do not register: conversions (``model.half()``), deep copies, lazy parameters.

Knows torch's modules and parameters; must not know where tensors lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

_installed: list[tuple[Any, str, Any, Any]] = []
"""Owner, name, what stood there, what stands there."""


def announce_made_tensors(announce: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
    """From now on ``announce(made, source)`` is called with each tensor that takes the place of ``source`` in a module, or is
    the copy of a parameter; for a lazy parameter that has got its shape there is no source. Calling it again changes nothing.
    """
    if _installed:
        return
    lazy: Any = UninitializedParameter.__mro__[1]  # the class that has the method, under which buffers share it
    plain_apply: Any = nn.Module._apply
    plain_copy: Any = nn.Parameter.__deepcopy__
    plain_materialize: Any = lazy.materialize

    @functools.wraps(plain_apply)
    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        return plain_apply(self, fn if isinstance(fn, _Announced) else _Announced(fn, announce), recurse)

    @functools.wraps(plain_copy)
    def __deepcopy__(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo
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
    """The counterpart of `announce_made_tensors`: torch is again as it was."""
    while _installed:
        owner, name, plain, ours = _installed.pop()
        if vars(owner)[name] is ours:  # else somebody has wrapped it since, and what it calls does no harm
            setattr(owner, name, plain)


class _Announced:
    """What a module applies to its tensors, with word of the results."""

    def __init__(self, fn: Any, announce: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        self._fn = fn
        self._announce = announce

    def __call__(self, tensor: torch.Tensor) -> Any:
        made = self._fn(tensor)
        if made is not tensor and isinstance(made, torch.Tensor) and isinstance(tensor, nn.Parameter):
            self._announce(made, tensor)
        return made


def _replace(owner: Any, name: str, ours: Any) -> None:
    _installed.append((owner, name, vars(owner)[name], ours))
    setattr(owner, name, ours)
