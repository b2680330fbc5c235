"""Writes the trained weights as safetensors, tensor by tensor.

[Note: streaming safetensors] The library's writer copies all tensors of a file before it writes the first. A file is eight
bytes with the length of a header in JSON, the header, and the tensors one after the other (the format's description is
part of https://github.com/huggingface/safetensors): that needs no copy of what lies in memory already.
"""

from __future__ import annotations

import functools
import glob
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from infinity.errors import StorageError, format_bytes
from infinity.holding import ModelHolding
from infinity.pager import Pager
from infinity.unit import Unit
from swapper import SwapperError

_ALIGNMENT_BYTES = 8
_NAME_OF_PICKLES = "pytorch_model.bin"
"""DeepSpeed's default. Nobody looks for safetensors under that name."""


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file."""

    names: Sequence[str]
    shape: Sequence[int]
    dtype: torch.dtype
    value: Callable[[], torch.Tensor]
    """Called when it is written."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save_safetensors(holding: ModelHolding, pager: Pager, directory: Path, filename: str) -> None:
    """One shard per unit plus one for buffers, and an index. They are moved into place when all are whole.

    Other files of that name in the directory, those of an earlier save, are removed then.
    Tied weights are written under each of their names, so that a strict ``load_state_dict`` finds them all. Memory: a unit's
    flat buffer, and besides that one tensor where it lies on a GPU or is not contiguous.

    Raises:
        StorageError: the directory cannot take them; what was there before is still there, unless moving itself failed.
    """
    stem = filename.removesuffix(".safetensors")
    if stem == _NAME_OF_PICKLES:
        stem = "model"
    index_path = directory / f"{stem}.safetensors.index.json"
    names: dict[int, list[str]] = {}
    for fqn, parameter in holding.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    buffers = _persistent_buffers(holding.model)
    num_shards = len(holding.units) + bool(buffers)
    index: dict[str, str] = {}
    partials: dict[Path, Path] = {}
    total_bytes = 0

    def write(number: int, entries: Sequence[_Entry]) -> None:
        nonlocal total_bytes
        shard = f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors"
        partials[directory / shard] = partial = _partial(directory / shard)
        _write_file(partial, entries)
        for entry in entries:
            index.update(dict.fromkeys(entry.names, shard))
            total_bytes += entry.num_bytes * len(entry.names)

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, unit in enumerate(holding.units, start=1):
            with pager.opened(unit):
                write(number, _entries_of(unit, names))
        if buffers:
            write(num_shards, buffers)
        contents = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(index.items()))}
        partials[index_path] = partial = _partial(index_path)  # the last: without it, nobody takes the shards for whole
        partial.write_text(json.dumps(contents, indent=2) + "\n")
        index_path.unlink(missing_ok=True)
        for path, partial in partials.items():
            partial.replace(path)
    except SwapperError:  # some of them are OSErrors, too
        raise
    except OSError as error:
        needed = sum(unit.num_bytes for unit in holding.units)
        raise StorageError(
            directory,
            f"cannot take the weights: {error.strerror or error}",
            cure=f"Give a directory that can be written to, with {format_bytes(needed)} free",
        ) from error
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    # Older weights of that name: a reader would take a single file before an index.
    old = f"{glob.escape(stem)}-*-of-*.safetensors"
    for path in (directory / f"{stem}.safetensors", *directory.glob(old), *directory.glob(f".{old}.partial")):
        if path.name not in index.values():
            path.unlink(missing_ok=True)
    _save_configs(holding.model, directory)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _entries_of(unit: Unit, names: dict[int, list[str]]) -> list[_Entry]:
    return [
        _Entry(names[id(parameter)], slot.spec.shape, slot.spec.dtype, functools.partial(unit.weight, slot))
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
    ]


def _write_file(path: Path, entries: Sequence[_Entry]) -> None:
    """See [Note: streaming safetensors]."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        for name in entry.names:
            offsets = [end, end + entry.num_bytes]
            described[name] = {"dtype": _name_of(entry.dtype), "shape": list(entry.shape), "data_offsets": offsets}
            end += entry.num_bytes
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for entry in entries:
            flat = entry.value().cpu().contiguous().reshape(-1).view(torch.uint8)
            for _ in entry.names:
                file.write(flat.numpy().data)


def _name_of(dtype: torch.dtype) -> str:
    """The format's name of a dtype, as the library itself writes it."""
    written = save({"empty": torch.empty(0, dtype=dtype)})
    return str(json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["empty"]["dtype"])


def _persistent_buffers(model: torch.nn.Module) -> list[_Entry]:
    found: list[_Entry] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                fqn = f"{prefix}.{name}" if prefix else name
                found.append(_Entry((fqn,), buffer.shape, buffer.dtype, buffer.detach))
    return found


def _save_configs(model: Any, directory: Path) -> None:
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(directory)
