"""The manifest of a checkpoint: which files belong to it, how long they are, and what their checksums are.

Checks all of that before anything is believed; must not know what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from infinity.checkpoint.arrays import ArraySpec
from infinity.errors import CheckpointError
from swapper.wrappers.checksum import crc32c

MANIFEST = "manifest.json"
TENSORS = "tensors.zarr"
VERSION = 2
_FORMAT = "infinity-checkpoint"
_MOST_BYTES = 1 << 30
"""Of a manifest: that of a million tensors is half as long."""
_LARGEST_CHUNK = 64 << 20
_MOST_CHUNKS = 1 << 22
"""Of one array, 8 TiB: their index is held in memory, and a sparse file may claim any number."""
_NUM_SIZES = 64
_MOST_LETTERS = 250
"""Of a folder's name, where file systems have 255."""


@dataclass(frozen=True)
class SavedArray:
    """One array, and the checksum of its chunks' checksums."""

    spec: ArraySpec
    checksum: int

    @property
    def path(self) -> str:
        """Its folder inside the checkpoint."""
        return array_path(self.spec)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    arrays: tuple[SavedArray, ...]
    files: Mapping[str, tuple[int, int]]
    """Path inside the checkpoint -> bytes and crc32c, of every file but the arrays' data and the manifest."""

    def to_bytes(self) -> bytes:
        """The file: JSON without any freedom, so that each bit of it counts."""
        contents = {
            "format": _FORMAT,
            "version": VERSION,
            "arrays": [
                {
                    "group": each.spec.group,
                    "fqn": each.spec.fqn,
                    "kind": each.spec.kind,
                    "shape": list(each.spec.shape),
                    "dtype": each.spec.dtype,
                    "chunk": list(each.spec.chunk),
                    "crc32c": each.checksum,
                }
                for each in self.arrays
            ],
            "files": {name: list(facts) for name, facts in sorted(self.files.items())},
        }
        return _sealed(contents)


def array_path(spec: ArraySpec) -> str:
    """The folder of an array inside the checkpoint."""
    return f"{TENSORS}/{spec.group}/{_folder(spec.fqn)}/{_folder(spec.kind)}"


def _folder(name: str) -> str:
    """As a file system has it. A percent sign that no two digits follow is in no other name."""
    quoted = quote(name, safe="", errors="surrogatepass")
    if len(quoted) <= _MOST_LETTERS:
        return quoted
    digest = hashlib.sha256(quoted.encode()).hexdigest()
    return f"{quoted[: _MOST_LETTERS - 1 - len(digest)]}%-{digest}"


def checksum_of(data: bytes) -> int:
    """crc32c of a small file."""
    return crc32c(np.frombuffer(data, np.uint8))


def _sealed(contents: Mapping[str, Any]) -> bytes:
    text = json.dumps({**contents, "crc32c": 0}, separators=(",", ":"))
    checksum = checksum_of(text.encode())
    return (text.removesuffix("0}") + f"{checksum}}}\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check it, and that the files are there with their sizes; reads nothing else.

    Raises:
        CheckpointError: it is damaged, of another version, or names what no checkpoint has.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            folder,
            f"there is no {MANIFEST} in it",
            cure="Give a directory that engine.save_checkpoint has written; `python -m infinity import-deepspeed` makes one of "
            "DeepSpeed's",
        )
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(path, f"it has {path.stat().st_size} bytes, which no manifest has")
    data = path.read_bytes()
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(path, "it is damaged: no JSON of a manifest") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        raise CheckpointError(path, "it is no manifest of a checkpoint")
    version = contents.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            path, f"it has format version {version}, and this package reads {VERSION}", cure="Use a newer package"
        )
    contents.pop("crc32c", None)
    if version != VERSION or _sealed(contents) != data:
        raise CheckpointError(path, "it is damaged: its checksum is wrong")
    try:
        arrays = tuple(_array(folder, each) for each in contents["arrays"])
        files = {str(name): _facts(folder, str(name), facts) for name, facts in contents["files"].items()}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(path, f"it is no manifest of a checkpoint: {error!r}") from error
    return Manifest(arrays, files)


def is_manifest(path: Path) -> bool:
    """Whether a file begins as manifests do; of a checkpoint of any version."""
    with path.open("rb") as file:
        begin = f'{{"format":"{_FORMAT}",'.encode()
        return file.read(len(begin)) == begin


def _array(folder: Path, entry: Mapping[str, Any]) -> SavedArray:
    shape, chunk = tuple(entry["shape"]), tuple(entry["chunk"])
    names = (entry["group"], entry["fqn"], entry["kind"], entry["dtype"])
    sizes = [*shape, *chunk]
    path = folder / MANIFEST
    if not all(isinstance(name, str) and name for name in names) or names[0] not in ("parameters", "buffers"):
        raise CheckpointError(path, f"it has an array that is named {names}")
    if any(name in (".", "..") for name in names) or len(shape) > _NUM_SIZES:
        raise CheckpointError(path, f"it has an array that is named {names}")
    if any(type(size) is not int or size < 0 or size >= 1 << 62 for size in sizes) or not _is_cut(shape, chunk):
        raise CheckpointError(path, f"'{names[1]}' has the shape {shape}, in chunks of {chunk}")
    spec = ArraySpec(*names[:3], shape, names[3], chunk)
    if not spec.is_known or spec.data_bytes > _LARGEST_CHUNK or spec.num_chunks > _MOST_CHUNKS:
        raise CheckpointError(path, f"'{names[1]}' has dtype {names[3]!r} and chunks of {chunk}, which none has")
    if spec.num_bytes:
        _check_size(folder / array_path(spec) / spec.file_name, spec.num_bytes)
    return SavedArray(spec, int(entry["crc32c"]))


def _is_cut(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Whether each chunk is contiguous in the tensor."""
    if len(shape) != len(chunk) or any(part < 1 for part in chunk):
        return False
    axis = len(shape)
    while axis and chunk[axis - 1] == max(shape[axis - 1], 1):
        axis -= 1
    return math.prod(chunk[: max(axis - 1, 0)]) == 1 and (not axis or chunk[axis - 1] <= max(shape[axis - 1], 1))


def _facts(folder: Path, name: str, facts: Any) -> tuple[int, int]:
    num_bytes, checksum = facts
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise CheckpointError(folder / MANIFEST, f"it names a file {name!r} that lies elsewhere")
    if type(num_bytes) is not int or not 0 <= num_bytes < 1 << 62:
        raise CheckpointError(folder / MANIFEST, f"'{name}' is to have {num_bytes} bytes")
    _check_size(folder / name, num_bytes)
    return num_bytes, int(checksum)


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(path, f"it is missing: {error.strerror}") from error
    if found != num_bytes:
        raise CheckpointError(path, f"it has {found} bytes, not {num_bytes}")


def read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    """The contents of a small file of a checkpoint.

    Raises:
        CheckpointError: they are not what was written, or cannot be read.
    """
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        cure = "Let this process read it, or load another checkpoint"
        raise CheckpointError(folder / name, f"it cannot be read: {error.strerror or error}", cure=cure) from error
    if (len(data), checksum_of(data)) != manifest.files.get(name):
        raise CheckpointError(folder / name, "it is damaged: its checksum is wrong")
    return data


__all__ = [
    "MANIFEST",
    "TENSORS",
    "VERSION",
    "Manifest",
    "SavedArray",
    "array_path",
    "checksum_of",
    "is_manifest",
    "read_checked",
    "read_manifest",
]
