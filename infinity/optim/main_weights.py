"""fp32 main weights inside an optimizer's state dict, so that a training in 16 bits resumes with every bit.

Model and optimizer of a training in plain fp32 are resumed from their two state dicts. With 16-bit weights those lack the
low bits of the main weights, so the optimizer's carries the main weights as well: as one more entry of each parameter's
state, which torch's own optimizers keep and do not look at.

[Note: stale main weights] Because they keep it, a main weight may come back after a training elsewhere has moved weights and
state on. So it goes with a checksum of the state beside it, and is left out where that has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAIN_WEIGHT = "main_weight"
"""The key of the main weight: fp32, of the parameter's shape."""
_CHECKSUM = "main_weight_checksum"
PENDING = "main_weights"
"""The key, beside "state" and "param_groups", of main weights of parameters that have no state yet."""
_CHECKED_ELEMENTS = 1024  # of each state: a step changes nearly all elements, so a few show it


def with_main_weight(state: dict[str, Any], main: Tensor) -> dict[str, Any]:
    """``state`` with its parameter's main weight."""
    return {**state, MAIN_WEIGHT: main, _CHECKSUM: _checksum(state)}


def without_main_weight(entry: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """The state by itself, and the main weight, if one goes with it: see [Note: stale main weights]."""
    state = {name: value for name, value in entry.items() if name not in (MAIN_WEIGHT, _CHECKSUM)}
    main = entry.get(MAIN_WEIGHT)
    if not isinstance(main, Tensor) or main.dtype != torch.float32:
        return state, None
    # An entry without a checksum is a main weight that was put there by hand: it counts.
    return state, main.detach() if entry.get(_CHECKSUM, _checksum(state)) == _checksum(state) else None


def _checksum(state: Mapping[str, Any]) -> int:
    """A checksum of the step count and the first elements of each per-element state."""
    checksum = 0
    for name in sorted(state):
        value = state[name]
        # Bytes of fp64, so that fp32 and bf16 copies of a checkpoint with the same values agree.
        if isinstance(value, Tensor | int | float):
            some = torch.as_tensor(value).detach().cpu().reshape(-1)[:_CHECKED_ELEMENTS].to(torch.float64)
            checksum = zlib.crc32(name.encode() + bytes(some.view(torch.uint8).tolist()), checksum)
    return checksum
