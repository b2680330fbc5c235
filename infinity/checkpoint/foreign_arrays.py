"""Arrays of a checkpoint that another program wrote with zarr, in its own chunks and compression.

`seal` makes them a part of the checkpoint. Checksums of their files are compared before zarr reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Container, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from infinity.checkpoint.arrays import STORED_AS, TENSORS, ArraySpec, SavedTensor, dtype_of, name_of
from infinity.errors import CheckpointError, size
from swapper.volumes.block_files import BlockThreads

LARGEST_CHUNK = 64 << 20
"""Bytes that are read at a time, and the largest chunk of zarr: it is decompressed whole, in memory."""
MOST_CHUNKS = 1 << 22
"""Per array: 8 TiB of our own chunks. Their index is built in memory, and a sparse file may claim any number."""
_CODECS = frozenset({"bytes", "transpose", "sharding_indexed", "crc32c", "zstd", "gzip", "blosc"})
"""The codecs that every zarr has. Another one may load a plugin, and so run code that the file chose."""


@dataclasses.dataclass(frozen=True)
class ForeignTensor(SavedTensor):
    """A tensor in an array that another program wrote. The manifest lists its files among the small ones."""

    @property
    def block_bytes(self) -> int:
        """0: zarr reads it, so it needs no block of direct I/O."""
        return 0

    @property
    def file_bytes(self) -> int:
        """0: all of its files are counted with the small ones."""
        return 0

    def parts(self, threads: BlockThreads | None = None) -> Generator[tuple[int, torch.Tensor], None, None]:
        """See `SavedTensor.parts`. Memory: up to `LARGEST_CHUNK`, and a few chunks of zarr's."""
        with _zarr_errors_converted(self.folder / self.path):
            array = _opened(self.folder / self.path)
            if (tuple(array.shape), array.dtype.name) != (self.shape, STORED_AS[name_of(self.dtype)]):
                raise ValueError(f"it has the shape {array.shape} and dtype {array.dtype}, and the manifest others")
        # Our parts are whole in all dimensions but one, so that each is contiguous. Along that one they end at borders of
        # zarr's chunks, or a chunk on a border would be decompressed twice. With our parts of (1, 512, 1024) and zarr's
        # chunks of (1, 200, 1024), it reads (1, 400, 1024) at a time.
        part_shape = list(self.chunk)
        for axis, (length, part) in enumerate(zip(self.shape, self.chunk, strict=True)):
            if array.chunks[axis] < part < length:
                part_shape[axis] -= part % array.chunks[axis]
        first = 0
        for region in dataclasses.replace(self, chunk=tuple(part_shape)).regions():
            with _zarr_errors_converted(self.folder / self.path):
                values = torch.from_numpy(np.array(array[region]).reshape(-1)).view(self.dtype)
            yield first, values
            first += values.numel()


@contextlib.contextmanager
def _zarr_errors_converted(path: Path) -> Iterator[None]:
    """Turn what zarr and its codecs raise into a `CheckpointError` that names ``path``."""
    try:
        yield
    except CheckpointError:
        raise
    # Which class a damaged file raises depends on the codec.
    except Exception as error:
        problem = f"zarr cannot read it: {str(error)[:200] or type(error).__name__}"
        raise CheckpointError(path, problem, cure="Write it again, in zarr's format 3") from error


def _opened(path: Path) -> Any:
    import zarr

    array: Any = zarr.open_array(path, mode="r", zarr_format=3)
    strange = _names_of(array.metadata.to_dict()["codecs"]) - _CODECS
    if strange:
        raise ValueError(f"its codec '{min(strange)}' is none of {', '.join(sorted(_CODECS))}")
    # Limits come before the first read: zarr allocates what the metadata claims.
    if math.prod(array.chunks) * array.dtype.itemsize > LARGEST_CHUNK:
        raise ValueError(f"its chunks of {array.chunks} elements have more than {size(LARGEST_CHUNK)}")
    if math.prod(-(-length // part) for length, part in zip(array.shape, array.chunks, strict=True)) > MOST_CHUNKS:
        raise ValueError(f"its chunks of {array.chunks} elements are more than {MOST_CHUNKS}")
    return array


def _names_of(codecs: Any) -> set[str]:
    """The names in a list of codecs (JSON), with those inside shards."""
    found = set()
    for codec in codecs:
        found.add(str(codec["name"]))
        for inner in ("codecs", "index_codecs"):
            found |= _names_of(codec.get("configuration", {}).get(inner, ()))
    return found


def found_arrays(folder: Path) -> list[ArraySpec]:
    """Describe the arrays that zarr finds in a checkpoint's directory.

    Raises:
        CheckpointError: zarr cannot read an array, or its name or dtype is not a checkpoint's.
    """
    import zarr

    path = folder / TENSORS
    with _zarr_errors_converted(path):
        nodes = dict(zarr.open_group(path, mode="r", zarr_format=3).members(max_depth=None))
        return [_spec(folder, name) for name, node in sorted(nodes.items()) if isinstance(node, zarr.Array)]


def _spec(folder: Path, name: str) -> ArraySpec:
    path = f"{TENSORS}/{name}"
    with _zarr_errors_converted(folder / path):
        array = _opened(folder / path)
        group, fqn, kind = name.split("/")  # docs/reference/checkpoint-format.md
        # Attributes count more than the path: the path of a long name is shortened, and bf16 is stored as uint16.
        names: dict[str, Any] = {"fqn": unquote(fqn), "kind": unquote(kind), "dtype": array.dtype.name, **array.attrs}
        dtype = dtype_of(names["dtype"])
        if dtype is None or STORED_AS[names["dtype"]] != array.dtype.name:
            raise ValueError(f"it is stored as {array.dtype}, and is to be {names['dtype']}")
        spec = ArraySpec.of(group, names["fqn"], names["kind"], array.shape, dtype)
        # `SavedTensor` computes the path from the names, so an array elsewhere would not be found again.
        if spec.path != path:
            raise ValueError(f"the tensor '{spec.fqn}' ({spec.kind}) belongs to {spec.path}")
        # Same metadata as ours, so the data would be one file. zarr reads a missing chunk as zeros, without an error.
        is_ours = json.loads((folder / path / "zarr.json").read_bytes()) == json.loads(spec.metadata())
        if is_ours and spec.file_bytes and not (folder / path / spec.file_name).exists():
            raise ValueError(f"its file '{spec.file_name}' is missing")
    return spec


def unlisted_file(folder: Path, tensor: SavedTensor, listed: Container[str]) -> str | None:
    """A file of a `ForeignTensor` that is not in ``listed``: zarr would read it, and no checksum covers it."""
    for place, _, names in os.walk(folder / tensor.path) if isinstance(tensor, ForeignTensor) else ():
        for name in names:
            inside = str((Path(place) / name).relative_to(folder))
            if inside not in listed:
                return inside
    return None
