"""Packed bytes that a parameter already has: from quantized files, or from an engine that was closed.

The parameter has the unpacked values as well. The bytes are valid as long as nobody has written to the parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_ATTRIBUTE = "_infinity_packed"


class _Source(NamedTuple):
    format: str
    stored: torch.Tensor
    version: int
    address: int


def set_source(parameter: torch.Tensor, name: str, stored: torch.Tensor) -> None:
    """Record that ``parameter`` now has the values of ``stored`` (uint8, packed in the format of this name)."""
    holder: Any = parameter
    setattr(holder, _ATTRIBUTE, _Source(name, stored, parameter._version, parameter.data_ptr()))


def source_of(parameter: torch.Tensor, name: str | None, num_bytes: int) -> torch.Tensor | None:
    """The parameter's ``num_bytes`` packed bytes in this format; None if they are not known or no longer valid."""
    source: _Source | None = getattr(parameter, _ATTRIBUTE, None)
    if source is None or source.format != name:
        return None
    is_same = source.version == parameter._version and source.address == parameter.data_ptr()
    # In-place writes raise torch's version counter, and `p.data = ...` changes the address. A tile takes over the
    # attributes of the whole weight, whose bytes are not its own: their number tells.
    return source.stored if is_same and source.stored.numel() == num_bytes else None


def clear_source(parameter: torch.Tensor) -> None:
    """Forget the packed bytes of a parameter."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
