"""Values of scalars, groups and schedulers, and whatever a script adds, as JSON; what JSON cannot hold, pickled.

Types are kept: tuples, keys that are no text, tensors, numbers that are not finite.
"""

from __future__ import annotations

import base64
import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint.arrays import name_of
from infinity.errors import CheckpointError
from infinity.numerics.raw_bytes import raw_bytes

_LARGEST_TENSOR = 1 << 16
"""Bytes of a tensor that goes into JSON."""
_TAG = "__is__"


def encode(value: Any, objects: list[Any]) -> Any:
    """``value`` as JSON has it. What it cannot hold is appended to ``objects``, and referred to."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "value": repr(value)}
    if kind is list:
        return [encode(each, objects) for each in value]
    if kind is tuple:
        return {_TAG: "tuple", "value": [encode(each, objects) for each in value]}
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(each, objects) for key, each in value.items()}
        pairs = [[encode(key, objects), encode(each, objects)] for key, each in value.items()]
        return {_TAG: "dict", "value": pairs}
    if kind is torch.Tensor and _is_small(value):
        data = _text(raw_bytes(value).numpy())
        return {_TAG: "tensor", "dtype": name_of(value.dtype), "shape": list(value.shape), "value": data}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": _text(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {_TAG: "number", "dtype": value.dtype.str, "value": _text(value)}
    objects.append(value)
    return {_TAG: "object", "value": len(objects) - 1}


def _text(data: npt.NDArray[Any] | np.generic) -> str:
    """Its bytes, in C order."""
    return base64.b64encode(data.tobytes()).decode()


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    return is_plain and tensor.numel() * tensor.dtype.itemsize <= _LARGEST_TENSOR


def decode(value: Any, objects: list[Any]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(each, objects) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get(_TAG), value.get("value")
    if kind is None:
        return {key: decode(each, objects) for key, each in value.items()}
    if kind == "float":
        return float(str(inner))
    if kind == "tuple":
        return tuple(decode(inner, objects))
    if kind == "dict":
        return {_key(decode(key, objects)): decode(each, objects) for key, each in inner or ()}
    if kind == "object":
        return objects[int(inner or 0)]
    data = bytearray(base64.b64decode(str(inner)))
    if kind == "array":
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"])
    if kind == "number":
        return np.frombuffer(data, np.dtype(value["dtype"]))[0]
    dtype = getattr(torch, value["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(value["shape"])


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def pickled(objects: list[Any]) -> bytes:
    """The objects as ``torch.save`` writes them."""
    file = io.BytesIO()
    torch.save(objects, file)
    return file.getvalue()


def unpickled(path: Path, data: bytes) -> list[Any]:
    """What `pickled` was given, as far as torch loads it with ``weights_only=True``.

    Raises:
        CheckpointError: there is a class in it that nobody has declared to be safe.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                raise ValueError("it is compressed, which torch.save never does")
        found: list[Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds
        try:
            reason = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
        except Exception:
            reason = str(error)[:200]
        raise CheckpointError(
            path,
            f"it holds objects that torch does not load with weights_only=True ({reason})",
            cure="If you trust the checkpoint, call torch.serialization.add_safe_globals([their classes]) before",
        ) from error
    return found
