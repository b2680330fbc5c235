"""The manifest of a checkpoint: which files belong to it, how long they are, and what their checksums are.

Nothing in a manifest is trusted: all of it is checked before it is used.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infinity.checkpoint.arrays import TENSORS, ArraySpec, SavedTensor, chunk_of, dtype_of, name_of, reading_from
from infinity.checkpoint.foreign_arrays import LARGEST_CHUNK, MOST_CHUNKS, ForeignTensor, unlisted_file
from infinity.device.host_memory import free_bytes
from infinity.errors import CheckpointError, format_bytes
from infinity.version import __version__
from swapper.wrappers.checksum import crc32c

MANIFEST = "manifest.json"
VERSION = 3
_FORMAT = "infinity-checkpoint"
# `manifest_of` writes these three keys first, so that `completed_at` needs only the first 256 bytes.
_TIME = re.compile(rb'\{"format":"[^"]*","version":\d+,"time":(\d{1,19})[,}]')
_MOST_BYTES = 1 << 30
"""The largest manifest that is read. One of a million tensors has about half as many bytes."""
_SMALL_BYTES = 16 << 20
"""The largest small file that is read without a look at free memory."""
_PART_BYTES = 1 << 16  # read at a time for the checksum of a file of any size
_SEAL = "run `python -m infinity checkpoint seal` on the checkpoint's directory"
_IF_CHANGED = f"Load another checkpoint. If a program has changed this one on purpose, {_SEAL}"
_NUM_SIZES = 64  # NumPy's limit on dimensions
Files = Mapping[str, tuple[int, int]]
"""Path inside the checkpoint -> bytes and crc32c, of every file but the arrays' data and the manifest."""


def manifest_of(arrays: Iterable[tuple[ArraySpec, int | None]], files: Files, time: int) -> bytes:
    """The bytes of a manifest: JSON with a fixed order of keys and no blanks.

    Args:
        arrays: each with the checksum of its chunks' checksums. None: another program wrote it, and ``files`` lists
            all of its files.
        files: all other files.
        time: when the checkpoint was complete, in nanoseconds since 1970.
    """
    contents = {
        "format": _FORMAT,
        "version": VERSION,
        "time": time,
        "made_by": f"infinity {__version__}",
        "arrays": [
            {
                "group": spec.group,
                "fqn": spec.fqn,
                "kind": spec.kind,
                "shape": list(spec.shape),
                "dtype": name_of(spec.dtype),
                # No chunk marks an array of another program: `_array` makes a `ForeignTensor` of it.
                "chunk": None if checksum is None else list(spec.chunk),
                "crc32c": checksum or 0,
            }
            for spec, checksum in arrays
        ],
        "files": {name: list(facts) for name, facts in sorted(files.items())},
    }
    return _sealed(contents)


def checksum_of(data: bytes) -> int:
    """crc32c of a small file."""
    return crc32c(np.frombuffer(data, np.uint8))


def _sealed(contents: Mapping[str, Any]) -> bytes:
    # The checksum covers the text with a 0 in its own place, which is the last key:
    #   {...,"crc32c":0}  becomes  {...,"crc32c":305419896} and a newline
    text = json.dumps({**contents, "crc32c": 0}, separators=(",", ":"))
    checksum = checksum_of(text.encode())
    return (text.removesuffix("0}") + f"{checksum}}}\n").encode()


def read_manifest(folder: Path) -> tuple[list[SavedTensor], Files]:
    """Read and check the manifest, and compare the sizes of all files. Reads no other file.

    Raises:
        CheckpointError: it is damaged or of another version, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    with reading_from(path):
        if not path.is_file():
            raise CheckpointError(
                folder,
                f"there is no {MANIFEST} in it",
                cure="Give a directory that engine.save_checkpoint has written; `python -m infinity import-deepspeed` makes one "
                "of DeepSpeed's",
            )
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(path, f"it has {path.stat().st_size} bytes, which no manifest has")
        data = path.read_bytes()
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(path, "it is damaged: it does not hold the JSON of a manifest") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        raise CheckpointError(path, "it is no manifest of a checkpoint")
    # Sealing the parsed contents again gives the same bytes only if no bit was flipped: blanks and the order of keys
    # are compared as well.
    contents.pop("crc32c", None)
    by = str(contents.get("made_by", "an earlier version"))[:40]
    _check_version(path, contents.get("version"), by, is_sealed=_sealed(contents) == data)
    try:
        arrays = [_array(folder, each) for each in contents["arrays"]]
        files = {str(name): _facts(folder, str(name), facts) for name, facts in contents["files"].items()}
        unlisted = next((found for each in arrays if (found := unlisted_file(folder, each, files)) is not None), None)
        if unlisted is not None:
            raise CheckpointError(folder / unlisted, "the manifest does not list it", cure=f"Remove it, or {_SEAL}")
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise CheckpointError(path, f"it is no manifest of a checkpoint: {error!r}") from error
    return arrays, files


def _check_version(path: Path, version: Any, by: str, *, is_sealed: bool) -> None:
    of_version = f"of format version {version}, made by {by}, and this is infinity {__version__}, which reads {VERSION}"
    # Older versions sealed manifests in the same way, so a wrong checksum there means damage. A newer version may seal
    # them in another way, so there it may mean either.
    if is_sealed and version == VERSION:
        return
    if not isinstance(version, int) or version == VERSION or (not is_sealed and version < VERSION):
        raise CheckpointError(path, "it is damaged: its checksum is wrong")
    if version < VERSION:
        cure = "Load it with the package that wrote it, export the weights there, and load these"
        raise CheckpointError(path, f"it is {of_version}", cure=cure)
    if is_sealed:
        raise CheckpointError(path, f"it is {of_version}", cure="Use a newer package")
    problem = f"its checksum is wrong: it is damaged, or {of_version}"
    raise CheckpointError(path, problem, cure="Load another one, or use a newer package")


def completed_at(path: Path) -> int | None:
    """When the checkpoint was complete, in nanoseconds since 1970; None if the file is no manifest of any version."""
    with path.open("rb") as file:
        begin = file.read(256)
        if not begin.startswith(f'{{"format":"{_FORMAT}",'.encode()):
            return None
        # The file's own time changes when a checkpoint is copied. Only the first versions wrote no time into the
        # manifest.
        found = _TIME.match(begin)
        return int(found[1]) if found else path.stat().st_mtime_ns


def _array(folder: Path, entry: Mapping[str, Any]) -> SavedTensor:
    is_foreign = entry["chunk"] is None
    shape = tuple(entry["shape"])
    # A placeholder that passes the checks below: another program's chunks are in zarr's own metadata.
    chunk = (1,) * len(shape) if is_foreign else tuple(entry["chunk"])
    names = (entry["group"], entry["fqn"], entry["kind"], entry["dtype"])
    sizes = [*shape, *chunk]
    path = folder / MANIFEST
    is_named = all(isinstance(name, str) and name not in ("", ".", "..") for name in names)
    if not is_named or names[0] not in ("parameters", "buffers") or len(shape) > _NUM_SIZES:
        raise CheckpointError(path, f"it has an array that is named {names}")
    # `type` and not isinstance: True is an int, too. 1 << 62: sums of two sizes stay in 64 bits.
    if any(type(size) is not int or size < 0 or size >= 1 << 62 for size in sizes) or not _is_cut(shape, chunk):
        raise CheckpointError(path, f"'{names[1]}' has the shape {shape}, in chunks of {chunk}")
    # torch counts bytes, and strides of empty tensors, in 64 bits: 1 << 60 elements of 8 bytes are too many.
    if math.prod(max(size, 1) for size in shape) >= 1 << 60:
        raise CheckpointError(path, f"'{names[1]}' has the shape {shape}, which no tensor has")
    dtype = dtype_of(names[3])
    checksum = _checksum(path, names[1], entry["crc32c"])
    if dtype is not None and is_foreign:
        parts = chunk_of(shape, LARGEST_CHUNK // dtype.itemsize)
        return ForeignTensor(*names[:3], shape, dtype, parts, checksum, folder)
    found = None if dtype is None else SavedTensor(*names[:3], shape, dtype, chunk, checksum, folder)
    if found is None or found.data_bytes > LARGEST_CHUNK or found.num_chunks > MOST_CHUNKS:
        raise CheckpointError(path, f"'{names[1]}' has dtype {names[3]!r} and chunks of {chunk}, which none has")
    if found.file_bytes:
        _check_size(folder / found.path / found.file_name, found.file_bytes)
    return found


def _is_cut(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Whether each chunk is contiguous in the tensor, as `SavedTensor.spans` needs it."""
    if len(shape) != len(chunk) or any(part < 1 for part in chunk):
        return False
    # Going inwards, a chunk must be 1 long, then of any length in one dimension, then whole. In a tensor (8, 1024,
    # 1024):
    #   (1, 512, 1024): yes. (2, 1024, 1024): yes. (2, 512, 1024): no, its two parts are 1024 * 1024 elements apart
    axis = len(shape)
    while axis and chunk[axis - 1] == max(shape[axis - 1], 1):
        axis -= 1
    return math.prod(chunk[: max(axis - 1, 0)]) == 1 and (not axis or chunk[axis - 1] <= max(shape[axis - 1], 1))


def _facts(folder: Path, name: str, facts: Any) -> tuple[int, int]:
    num_bytes, checksum = facts
    # A manifest may come from somebody else: no path in it may lead out of the checkpoint's directory.
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise CheckpointError(folder / MANIFEST, f"it names a file {name!r} outside of the checkpoint")
    if type(num_bytes) is not int or not 0 <= num_bytes < 1 << 62:
        raise CheckpointError(folder / MANIFEST, f"'{name}' is to have {num_bytes} bytes")
    _check_size(folder / name, num_bytes)
    return num_bytes, _checksum(folder / MANIFEST, name, checksum)


def _checksum(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise CheckpointError(path, f"'{name}' has the checksum {value!r}, which is none")
    return value


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        file = path.stat()
    except OSError as error:
        raise CheckpointError(path, f"it is missing: {error.strerror}", cure=_IF_CHANGED) from error
    # Reading a pipe would hang.
    if not stat.S_ISREG(file.st_mode):
        raise CheckpointError(path, "it is not a file, but a directory, a device or a pipe")
    found = file.st_size
    if found != num_bytes:
        raise CheckpointError(path, f"it has {found} bytes, not {num_bytes}", cure=_IF_CHANGED)


def facts_of(path: Path) -> tuple[int, int]:
    """Bytes and checksum of a file of any size. Reads it in parts."""
    num_bytes, checksum = 0, 0
    with reading_from(path), path.open("rb") as file:
        while data := file.read(_PART_BYTES):
            num_bytes += len(data)
            checksum = crc32c(np.frombuffer(data, np.uint8), after=checksum)
    return num_bytes, checksum


def check_file(folder: Path, files: Files, name: str) -> int:
    """Compare a small file of a checkpoint with its checksum. Returns its bytes.

    Raises:
        CheckpointError: see `read_checked`.
    """
    if not name.startswith(TENSORS):
        return len(read_checked(folder, files, name))
    # Arrays of another program are listed with the small files, and may be of any size.
    if facts_of(folder / name) != files[name]:
        raise _damaged(folder / name)
    return files[name][0]


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(path, "it is damaged: its checksum is wrong", cure=_IF_CHANGED)


def read_checked(folder: Path, files: Files, name: str) -> bytes:
    """The contents of a small file of a checkpoint.

    Raises:
        CheckpointError: they are not what was written, or cannot be read.
    """
    num_bytes, _ = files.get(name, (0, 0))
    # The manifest, maybe of somebody else, claims the size: too large a read would end the process.
    if num_bytes > _SMALL_BYTES and num_bytes > (free := free_bytes()):
        problem = f"it has {format_bytes(num_bytes)}, and {format_bytes(free)} of memory are free"
        raise CheckpointError(folder / name, problem, cure="Load it with more free memory, or another checkpoint")
    with reading_from(folder / name):
        data = (folder / name).read_bytes()
    if (len(data), checksum_of(data)) != files.get(name):
        raise _damaged(folder / name)
    return data
