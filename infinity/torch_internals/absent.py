"""Tensors that have a shape and no values: whoever gets past all guards and computes with one gets an error.

Knows torch's storages; must not know parameters.

[Note: no data] Compiled functions, functorch's transforms and C++ code get at a tensor without asking its class. What they
would compute with has to be an error, not a number, and not an address that ends the process. Storages of torch can refuse
to give their address away: torch does so with tensors that it traces, and its kernels ask there before they compute. Builds
with CUDA have a function that switches this on (and takes a message). In others only its counterpart for writing can be
reached; the switch for reading is the byte behind that one's, before that of a third. Where each is is found out from what
the two functions change; if that is not as expected, or reading is not refused afterwards, the values are NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MESSAGE = (
    "the values of this parameter are not in memory: compiled functions and functorch's transforms cannot fetch them. Use "
    "`with infinity.GatheredParameters(...)` around the call"
)
_LOOKED_AT_BYTES = 128
"""Of torch's StorageImpl, which is larger."""

_C: Any = torch._C


def absent(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without dimensions, to be expanded; its value cannot be read or written (see [Note: no data])."""
    filling = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    tensor = torch.full((), filling, dtype=dtype, device=device)
    if not _forbid(tensor):
        logger.info("this torch's storages cannot refuse to be read: what is not in memory is NaN")
        tensor = torch.full((), filling, dtype=dtype, device=device)
    return tensor


def _forbid(tensor: torch.Tensor) -> bool:
    """Forbid access to the tensor's storage. Returns whether that works."""
    with contextlib.suppress(AttributeError, RuntimeError):  # another version of torch
        address = int(tensor.untyped_storage()._cdata)
        announce = getattr(_C, "_set_storage_data_ptr_access_error_msg", None)
        if announce is not None:
            announce(address, _MESSAGE)
        else:
            switch = _switch_for_reading()
            if switch is None:
                return False
            _C._set_throw_on_mutable_data_ptr(tensor)
            ctypes.c_ubyte.from_address(address + switch).value = 1
        return _refuses(tensor)
    return False


def _refuses(tensor: torch.Tensor) -> bool:
    for read in (tensor.clone, tensor.data_ptr, lambda: tensor.add_(1)):
        try:
            read()
        except RuntimeError:
            continue
        return False
    return True


def _switch_for_reading() -> int | None:
    """Where in a StorageImpl the switch is, in bytes; None if it is not certain."""
    writing = _changed_by(_C._set_throw_on_mutable_data_ptr)
    deprecated = _changed_by(_C._set_warn_deprecated_on_mutable_data_ptr)
    common = [place for place in writing if place in deprecated]  # whether there is any switch to look at
    if len(writing) == len(deprecated) == 2 and len(common) == 1:
        first, last = max(writing), max(deprecated)
        if common[0] == first - 1 and first == last - 2:
            return first + 1
    return None


def _changed_by(function: Any) -> list[int]:
    tensor = torch.zeros(1, device="cpu", dtype=torch.float32)
    image = (ctypes.c_ubyte * _LOOKED_AT_BYTES).from_address(tensor.untyped_storage()._cdata)
    before = bytes(image)
    function(tensor)
    return [place for place, (a, b) in enumerate(zip(before, bytes(image), strict=True)) if (a, b) == (0, 1)]
