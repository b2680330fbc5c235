"""Conversions of modules (``model.float()``, ``model.to(...)``) and their ``load_state_dict``, as torch's flags say.

``torch.__future__`` has two by which they exchange parameters or put new ones in their place, where otherwise they write to
them. A held parameter cannot be exchanged, so a module that has one is treated as without the flags. torch asks for them in
methods of the module, of which nothing but the caller's frame tells.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.units.parameter import host_of

_FLAGS: Any = torch.__future__
_plain: dict[str, Callable[[], bool]] = {
    name: getattr(torch.__future__, name)
    for name in ("get_swap_module_params_on_conversion", "get_overwrite_module_params_on_conversion")
}
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def convert_in_place(holder: object) -> None:
    """Modules with held parameters keep them from now on, whatever the flags say, until `convert_as_before`."""
    _holders.add(holder)
    for name, plain in _plain.items():
        setattr(_FLAGS, name, functools.wraps(plain)(functools.partial(_get, plain)))


def convert_as_before(holder: object) -> None:
    """The counterpart of `convert_in_place`: with the last, torch is again as it was."""
    _holders.discard(holder)
    if not _holders:
        for name, plain in _plain.items():
            setattr(_FLAGS, name, plain)


def _get(plain: Callable[[], bool]) -> bool:
    if not plain():
        return False
    for depth in (1, 2):  # one of the flags is asked for in a function inside the method
        module = sys._getframe(depth).f_locals.get("self")
        if isinstance(module, nn.Module):
            return all(parameter is None or host_of(parameter) is None for parameter in module._parameters.values())
    return True
