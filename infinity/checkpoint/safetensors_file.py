"""Files in the format of safetensors, written tensor by tensor.

[Note: streaming safetensors] The library's writer copies all tensors of a file before it writes the first. This one
streams them. The format is described in https://github.com/huggingface/safetensors:

    8 bytes        length n of the header, little-endian
    n bytes        JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, blanks at the end
    the rest       the tensors in C order; offsets count from here
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any

import torch
from safetensors.torch import save

from infinity.errors import ModelError
from infinity.numerics.raw_bytes import raw_bytes, rows_of

_ALIGNMENT_BYTES = 8  # the header's length is a multiple, so that the tensors start aligned in a mapped file
_PIECE_BYTES = 16 << 20  # cast and written at a time: the memory beside the tensor itself


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        names: it is written under each of them.
        dtype: in the file. Values of another dtype are cast piece by piece.
        value: opens the whole tensor, until it is written.
        parts: if given, used in place of ``value``: yields 1-D pieces in C order, so the tensor is never whole.
        origin: the unit that holds it, for example. Tensors of one origin may be converted together.
    """

    names: Sequence[str]
    shape: Sequence[int]
    dtype: torch.dtype
    value: Callable[[], AbstractContextManager[torch.Tensor]]
    parts: Callable[[], Iterator[torch.Tensor]] | None = None
    origin: object = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes in the file, under all of its names."""
        return self.num_bytes * len(self.names)


def write_file(file: IO[bytes], entries: Sequence[Entry], note: Callable[[int], None]) -> None:
    """Write all tensors. See [Note: streaming safetensors]. ``note`` gets the number of bytes of each piece."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        for name in entry.names:
            # Each name has data of its own: the library's reader refuses tensors that overlap.
            offsets = [end, end + entry.num_bytes]
            described[name] = {"dtype": name_of(entry.dtype), "shape": list(entry.shape), "data_offsets": offsets}
            end += entry.num_bytes
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for entry in entries:
        for piece in _pieces(entry):
            file.write(piece.numpy().data)
            note(piece.numel())


def _pieces(entry: Entry) -> Iterator[torch.Tensor]:
    if not entry.num_bytes:
        return
    if entry.parts is not None:
        for _ in entry.names:
            for part in entry.parts():
                yield raw_bytes(part.to(entry.dtype))
        return
    with entry.value() as value:
        if tuple(value.shape) != tuple(entry.shape):
            raise RuntimeError(f"'{entry.names[0]}' has shape {tuple(value.shape)}, and not {tuple(entry.shape)}")
        for _ in entry.names:
            for rows in rows_of(value, _PIECE_BYTES):
                yield raw_bytes(rows.to(entry.dtype))


def check_entries(entries: Sequence[Entry]) -> None:
    """Check that the format supports all tensors and names.

    Raises:
        ModelError: it does not support one; the message names it.
    """
    for entry in entries:
        for name in entry.names:
            if name == "__metadata__":
                refuse(name, "the format uses that name for itself")
            try:
                name.encode()
            except UnicodeEncodeError:
                refuse(ascii(name), "its name cannot be encoded as text")
        try:
            name_of(entry.dtype)
        except Exception:
            refuse(entry.names[0], f"the format has no {entry.dtype}")


def refuse(name: str, why: str) -> None:
    """Raise a `ModelError` for one tensor."""
    problem = f"'{name}' cannot be written as safetensors: {why}"
    raise ModelError(problem, cure="Rename or convert it, or save engine.module.state_dict() with torch.save", fqn=name)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """The format's name of a dtype, read from a file that the library writes."""
    written = save({"empty": torch.empty(0, dtype=dtype, device="cpu")})
    return str(json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["empty"]["dtype"])
