"""Plain data as JSON and raw bytes: what checkpoints, commits and messages between processes hold beside large tensors.

Nothing that is read back has code of its own. JSON has no form for some values; these are ``{"__is__": TYPE, ...}``. A subclass
of a type here (a named tuple, an enumeration of integers, a dict of a library) is read back as that type.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from infinity.numerics.raw_bytes import raw_bytes
from infinity.torch_internals.names import DTYPES

# Larger values are appended as raw bytes: base64 takes a third more, and JSON is parsed in one piece.
_LARGEST_IN_JSON = 1 << 16
"""Bytes of a value that is written into the JSON text."""
_TAG = "__is__"
# Plain numbers and text only: numpy reads object arrays ("O") with pickle, which can run code.
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSU][1-9]\d{0,6}")
_COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_FROM_TEXT: dict[str, Any] = {"float": float, "device": torch.device, "path": Path, "dtype": DTYPES.__getitem__}
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What `unpack` and `decode` raise for bytes that `pack` and `encode` did not write."""


def pack(value: Any, where: str) -> bytes:
    """A value as bytes. ``where``: what the value is called in errors.

    Raises:
        TypeError: it holds something else than plain data; the message says where.
    """
    raw = bytearray()
    text = to_json(value, raw, where).encode()
    # 8 bytes: length of the JSON text; the JSON text; raw bytes.
    return len(text).to_bytes(8, "little") + text + raw


def unpack(data: bytes) -> Any:
    """What `pack` was given.

    Raises:
        Exception: one of `UNREADABLE`: these are other bytes.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    return from_json(data[8:end], data[end:])


def to_json(value: Any, raw: bytearray, where: str) -> str:
    """A value as JSON. The bytes of its large parts are appended to ``raw``; see `pack`."""
    return json.dumps(_encoded(value, raw, where), allow_nan=False, separators=(",", ":"))


def from_json(text: bytes | str, raw: bytes) -> Any:
    """What `to_json` was given; see `unpack`."""
    return _decoded(json.loads(text), memoryview(raw))


def _encoded(value: Any, raw: bytearray, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):  # the exact types: subclasses are converted below
        return value
    # Before float: np.float64 is a subclass of it, and would lose its dtype.
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {_TAG: kind, "dtype": value.dtype.str, "shape": list(value.shape), **_stored(value.tobytes(), raw)}
    if isinstance(value, float):
        # JSON has no infinities and NaN.
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, list):
        return [_encoded(each, raw, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict):
        return _encoded_dict(value, raw, where)
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, raw, where)
    for kind, base in _COLLECTIONS.items():
        if isinstance(value, base):
            return {_TAG: kind, "value": [_encoded(each, raw, f"{where}[...]") for each in value]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes" if isinstance(value, bytes) else "bytearray", **_stored(bytes(value), raw)}
    if isinstance(value, int | str):
        # A str enum's own __str__ gives "Class.NAME", not the value.
        return int(value) if isinstance(value, int) else str.__str__(value)
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype | torch.device | PurePath):
        kind = "path" if isinstance(value, PurePath) else type(value).__name__
        return {_TAG: kind, "value": str(value).removeprefix("torch.") if kind == "dtype" else str(value)}
    raise TypeError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is no plain data")


def _encoded_dict(value: dict[Any, Any], raw: bytearray, where: str) -> Any:
    # A dict that has the tag itself as a key is stored as pairs, or it would be read back as another type.
    if not isinstance(value, OrderedDict) and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encoded(each, raw, f"{where}[{key!r}]") for key, each in value.items()}
    pairs = [
        [_encoded(key, raw, f"a key of {where}"), _encoded(each, raw, f"{where}[{key!r}]")]
        for key, each in value.items()
    ]
    return {_TAG: "ordered dict" if isinstance(value, OrderedDict) else "dict", "value": pairs}


def _encoded_tensor(value: torch.Tensor, raw: bytearray, where: str) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES or value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise TypeError(f"{where} is a tensor of {value.dtype}, {value.layout}, on {value.device}: it is no plain data")
    # conj() and a negative view of complex tensors are flags on shared memory; raw bytes need the values themselves.
    whole = value.detach().cpu().resolve_conj().resolve_neg()
    return {
        _TAG: "tensor",
        "dtype": name,
        "shape": list(value.shape),
        **_stored(raw_bytes(whole).numpy().tobytes(), raw),
    }


def _stored(data: bytes, raw: bytearray) -> dict[str, Any]:
    if len(data) <= _LARGEST_IN_JSON:
        return {"value": base64.b64encode(data).decode()}
    start = len(raw)
    raw += data
    return {"at": start, "bytes": len(data)}


def _decoded(value: Any, raw: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(each, raw) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get(_TAG), value.get("value")
    if kind is None:
        return {key: _decoded(each, raw) for key, each in value.items()}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_decoded(each, raw) for each in inner or ())
    if kind in ("dict", "ordered dict"):
        pairs = ((_decoded(key, raw), _decoded(each, raw)) for key, each in inner or ())
        return OrderedDict(pairs) if kind == "ordered dict" else dict(pairs)
    if kind == "complex":
        return complex(*(float(str(each)) for each in inner or ()))
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](str(inner))
    return _of_bytes(str(kind), value, _fetched(value, raw))


def _of_bytes(kind: str, value: dict[str, Any], data: bytearray) -> Any:
    if kind in ("bytes", "bytearray"):
        return bytes(data) if kind == "bytes" else data
    shape = value["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    if kind in ("array", "number"):
        # From here on the bytes are not trusted: a file may be damaged, or written by somebody else.
        if not _NUMPY_DTYPE.fullmatch(value["dtype"]):
            raise ValueError(f"{value['dtype']!r} is no dtype of plain numbers")
        dtype = np.dtype(value["dtype"])
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} has {len(data)} bytes")
        # numpy does not check code points above U+10FFFF, and fails only when such text is used.
        if dtype.kind == "U" and data and int(np.frombuffer(data, f"{dtype.str[0]}u4").max()) > sys.maxunicode:
            raise ValueError("text in an array is none")
        # frombuffer raises for an empty buffer.
        array = (np.frombuffer(data, dtype) if data else np.zeros(math.prod(shape), dtype)).reshape(shape)
        return array if kind == "array" else array[()]
    if kind != "tensor":
        raise ValueError(f"{kind!r} is no type of plain data")
    of_torch = DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=of_torch) if data else torch.empty(0, dtype=of_torch, device="cpu")
    return flat.reshape(shape)


def _fetched(value: dict[str, Any], raw: memoryview) -> bytearray:
    if "at" not in value:
        return bytearray(base64.b64decode(str(value["value"]), validate=True))
    start, size = value["at"], value["bytes"]
    # A slice beyond the end would be shorter without an error.
    if type(start) is not int or type(size) is not int or start < 0 or size < 0 or start + size > len(raw):
        raise ValueError("a value lies outside of the bytes that there are")
    return bytearray(raw[start : start + size])  # writable, as torch.frombuffer expects
