"""Opens files with weights, of Hugging Face or torch.save, as memory mappings.

Nothing in a file is trusted. Names in an index cannot lead out of the directory. safetensors checks lengths and offsets
before a byte is used. Pickles are read without running anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.errors import CheckpointError, listed
from infinity.torch_internals.pickles import DamagedPickleError, read_pickle
from swapper.errors import limit_cure
from swapper.volumes.mapped_memory import map_file

_SAFETENSORS, _PICKLES = "model.safetensors", "pytorch_model.bin"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
_WHOLE = "Fetch it again, or save it again"


def open_weights(path: Path) -> dict[str, torch.Tensor]:
    """Open the weights of a directory, as transformers finds them, or of one file.

    Args:
        path: a directory with ``model.safetensors`` or ``pytorch_model.bin``, or shards and their index; or a file with
            tensors by name, as ``safetensors.torch.save_file`` or ``torch.save(model.state_dict(), ...)`` writes it.

    Returns:
        All tensors by name, on the CPU, over private mappings of the files: pages are read as they are used, and writes
        stay in this process.

    Raises:
        CheckpointError: a file is missing, cut off or broken; the message names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, Path] = {}
    try:
        for file, names in _files(path):
            found = _open(file)
            lacking = sorted(set(names) - found.keys())
            if lacking:
                problem = f"lacks '{lacking[0]}', which the index says is there"
                raise CheckpointError.of_weights(file, problem, cure=_WHOLE)
            for name in found:
                if name in files:
                    problem = f"has '{name}', and so has '{files[name]}'"
                    raise CheckpointError.of_weights(file, problem, cure="Remove one of them")
                files[name] = file
            tensors.update(found)
    except OSError as error:
        file = Path(error.filename) if error.filename else path
        limit = limit_cure(error)
        cure = f"To read it, {limit}" if limit else "Give this process read permission, or mount the drive"
        raise CheckpointError.of_weights(file, f"cannot be read: {error.strerror or error}", cure=cure) from error
    return tensors


def _files(path: Path) -> Iterable[tuple[Path, Sequence[str]]]:
    """Pairs of a file and the names that an index lists for it."""
    if path.is_file():
        return _sharded(path) if path.name.endswith(".index.json") else [(path, ())]
    if not path.is_dir():
        raise CheckpointError.of_weights(
            path, "does not exist", cure="Name a directory on this machine, or a file, with weights"
        )
    # transformers' order: a single file before an index, safetensors before pickles.
    for name in (_SAFETENSORS, _PICKLES):
        if (path / name).is_file():
            return [(path / name, ())]
        index = path / f"{name}.index.json"
        if index.is_file():
            return _sharded(index)
    there = sorted(each.name for each in path.iterdir())
    problem = f"has neither {_SAFETENSORS} nor {_PICKLES}, nor an index of shards; it has {listed(there, most=8) or 'nothing'}"
    cure = "Name the directory that save_pretrained or engine.save_16bit_model wrote to, or one file with tensors"
    raise CheckpointError.of_weights(path, problem, cure=cure)


def _sharded(index: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards: dict[Any, list[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError.of_weights(index, "is not an index of shards", cure=_WHOLE) from error
    for file in shards:
        place = PurePosixPath(file) if isinstance(file, str) and "\0" not in file else None
        if place is None or not place.parts or place.is_absolute() or ".." in place.parts:
            cure = "Do not load it: an index may only name files beside it"
            raise CheckpointError.of_weights(index, f"names {file!r}, which is not in its directory", cure=cure)
    missing = [file for file in shards if not (index.parent / file).is_file()]
    if missing:
        problem = f"names shards that do not exist: {', '.join(sorted(missing))}"
        raise CheckpointError.of_weights(index, problem, cure="Fetch them")
    for file, names in shards.items():
        yield index.parent / file, names


def _open(file: Path) -> dict[str, torch.Tensor]:
    with file.open("rb") as opened:
        # A safetensors file begins with 8 bytes of length, and then JSON.
        magic = opened.read(9)
    if file.suffix == ".safetensors" or magic[8:] == b"{":
        return _open_safetensors(file)
    return _open_pickle(file)


def _open_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        # This reads and checks only the header. With framework="pt" it would map the file in a way that the kernel
        # refuses for a file larger than memory.
        with safe_open(file, framework="np"):
            pass
        return _mapped_tensors(file)
    except CheckpointError:
        raise
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError.of_weights(file, f"is not a whole safetensors file: {error}", cure=_WHOLE) from error


def _mapped_tensors(file: Path) -> dict[str, torch.Tensor]:
    data = map_file(file)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            problem = f"has '{name}' of dtype {entry['dtype']}, which torch lacks"
            raise CheckpointError.of_weights(file, problem, cure="Convert it first")
        first, last = entry["data_offsets"]
        if first == last:
            tensors[name] = torch.empty(entry["shape"], dtype=dtype, device="cpu")
            continue
        flat = torch.from_numpy(data[start + first : start + last])
        # The format does not align tensors, and torch needs an aligned address.
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        tensors[name] = flat.view(dtype).view(entry["shape"])
    return tensors


def _open_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = read_pickle(file, map_file(file), lambda name: False)
    except DamagedPickleError as error:
        cure = "It must be what torch.save(model.state_dict(), ...) writes, with tensors only"
        raise CheckpointError.of_weights(file, f"cannot be looked at: {error}", cure=cure) from error
    with contextlib.suppress(AttributeError):
        if all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()):
            return dict(loaded)
    problem = "does not hold a state dict (tensors by name)"
    raise CheckpointError.of_weights(file, problem, cure="Save the state dict alone: torch.save(state_dict, ...)")
