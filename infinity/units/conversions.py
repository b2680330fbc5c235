"""Conversions of modules (``model.float()``, ``model.to(...)``) and their ``load_state_dict``, as torch's flags say.

``torch.__future__`` has two by which they exchange parameters or put new ones in their place, where otherwise they write to
them. A held parameter cannot be exchanged, so a module that has one is treated as without the flags. torch asks for them in
methods of the module, of which nothing but the caller's frame tells. ``torch.utils.swap_tensors`` itself is refused by name.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.errors import ParameterNotResidentError
from infinity.units.parameter import host_of

_plain_swap: Callable[[Any, Any], None] = torch.utils.swap_tensors
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def convert_in_place(holder: object) -> None:
    """Modules with held parameters keep them from now on, whatever the flags say, until `convert_as_before`."""
    _holders.add(holder)
    for module, plain, ours in _REPLACED:
        setattr(module, plain.__name__, ours)


def convert_as_before(holder: object) -> None:
    """The counterpart of `convert_in_place`: with the last, torch is again as it was."""
    _holders.discard(holder)
    if not _holders:
        for module, plain, _ in _REPLACED:
            setattr(module, plain.__name__, plain)


@functools.wraps(_plain_swap)
def _swap(t1: Any, t2: Any) -> None:
    for tensor in (t1, t2):
        host = host_of(tensor)
        if host is not None and isinstance(tensor, nn.Parameter):
            cure = "An engine keeps its parameters. To give one other values, p.data.copy_(...)"
            raise ParameterNotResidentError(host.slot_of(tensor).spec.fqn, operation="swap_tensors", cure=cure)
    _plain_swap(t1, t2)


def _in_place(flag: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(flag)
    def ours() -> bool:
        if not flag():
            return False
        for depth in (1, 2):  # one of the flags is asked for in a function inside the method
            module = sys._getframe(depth).f_locals.get("self")
            if isinstance(module, nn.Module):
                return all(parameter is None or host_of(parameter) is None for parameter in module._parameters.values())
        return True

    return ours


_REPLACED: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = [
    *(
        (torch.__future__, flag, _in_place(flag))
        for flag in (
            torch.__future__.get_swap_module_params_on_conversion,
            torch.__future__.get_overwrite_module_params_on_conversion,
        )
    ),
    (torch.utils, _plain_swap, _swap),
]
