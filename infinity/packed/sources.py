"""Where a parameter's packed bytes come from, if they are known: files that were quantized already, or an engine before.

A parameter with a source has the unpacked values as well, so nothing else has to know of it. The source counts as long as
nobody has written to the parameter since.
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
    """Note that ``parameter`` has the values of ``stored`` (uint8, packed in the format of this name) as it is now."""
    holder: Any = parameter
    setattr(holder, _ATTRIBUTE, _Source(name, stored, parameter._version, parameter.data_ptr()))


def source_of(parameter: torch.Tensor, name: str | None, num_bytes: int) -> torch.Tensor | None:
    """Its packed bytes in the format of this name, if they are known and it has not been written to.

    ``num_bytes``: how many there must be: those of a whole are not a tile's, which takes over its attributes.
    """
    source: _Source | None = getattr(parameter, _ATTRIBUTE, None)
    if source is None or source.format != name:
        return None
    is_same = source.version == parameter._version and source.address == parameter.data_ptr()
    return source.stored if is_same and source.stored.numel() == num_bytes else None


def clear_source(parameter: torch.Tensor) -> None:
    """The parameter has it no more."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
