"""Writes the trained weights as safetensors, tensor by tensor.

[Note: streaming safetensors] The library's writer copies all tensors of a file before it writes the first. A file is eight
bytes with the length of a header in JSON, the header, and the tensors one after the other (the format's description is
part of https://github.com/huggingface/safetensors): that needs no copy of what lies in memory already.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save

from infinity.checkpoint.adapters import is_adapted, save_adapters
from infinity.errors import StorageError, UnsupportedModelError, format_bytes
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.units.unit import Unit
from swapper import SwapperError
from swapper.volumes.publish import Staging, locked

_ALIGNMENT_BYTES = 8
_NAME_OF_PICKLES = "pytorch_model.bin"
"""DeepSpeed's default. Nobody looks for safetensors under that name."""
_CONFIGS = ("config", "generation_config")


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


@dataclass(frozen=True)
class _Shard:
    """The tensors of one file."""

    entries: Sequence[_Entry]
    unit: Unit | None
    """Whose parameters they are; it has to be open while they are written."""


def save_safetensors(
    module_hooks: ModuleHooks, pager: Pager, directory: Path, filename: str, *, trained_only: bool = False
) -> None:
    """One shard per unit, one for all that no unit holds, and an index; all at once, see ``swapper.volumes.publish``.

    What the model's modules have now is written: parameters that came later, too, and none that were removed. Older weights
    that a reader would take first, or that are left of an earlier save, are removed in the end. Tied weights are written
    once where the model's class says how it ties them (transformers), and else under each of their names, so that a strict
    ``load_state_dict`` finds them all. Of a PEFT model, the adapters are written as its own ``save_pretrained`` does it.
    Memory: a unit's flat buffer, and besides that one tensor where it lies on a GPU or is not contiguous.

    Args:
        trained_only: leave out what does not require a gradient.

    Raises:
        UnsupportedModelError: something cannot be written so that it can be read; nothing has been written.
        StorageError: the directory cannot take them; what was there before is still there.
    """
    stem = filename.removesuffix(".safetensors")
    if stem == _NAME_OF_PICKLES:
        stem = "model"
    needed = sum(unit.num_bytes for unit in module_hooks.units)
    with _told_of(directory, needed):
        if is_adapted(module_hooks.model):
            save_adapters(module_hooks.model, directory)
            return
        shards = _shards(module_hooks, trained_only=trained_only)
        _check([entry for shard in shards for entry in shard.entries])
        with Staging(directory, stem) as staging:
            for number, shard in enumerate(shards, start=1):
                opened = pager.opened(shard.unit) if shard.unit is not None else contextlib.nullcontext()
                with opened, staging.file(f"shard-{number}") as file:
                    _write(file, shard.entries)
            _publish(staging, module_hooks.model, directory, stem, shards)


@contextlib.contextmanager
def _told_of(directory: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except SwapperError:  # some of them are OSErrors, too
        raise
    except OSError as error:
        raise StorageError(
            directory,
            f"cannot take the weights: {error.strerror or error}",
            cure=f"Give a directory that can be written to, with {format_bytes(num_bytes)} free",
        ) from error


def _publish(staging: Staging, model: torch.nn.Module, directory: Path, stem: str, shards: Sequence[_Shard]) -> None:
    configs = _save_configs(model, staging)
    with locked(directory):
        there = {path.name for path in directory.iterdir()}
        names = _free_names(stem, len(shards), there)
        index = {
            name: file
            for shard, file in zip(shards, names, strict=True)
            for entry in shard.entries
            for name in entry.names
        }
        total = sum(entry.num_bytes * len(entry.names) for shard in shards for entry in shard.entries)
        contents = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        with staging.file("index") as file:
            file.write((json.dumps(contents, indent=2) + "\n").encode())
        moves = [(f"shard-{number}", name) for number, name in enumerate(names, start=1)]
        own = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}}(\.\d+)?)?\.safetensors")
        pickled = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?")
        staging.publish(
            moves,
            [(name, Path(name).name) for name in configs],
            ("index", f"{stem}.safetensors.index.json"),
            # A reader would take a single file before an index; and pickles where it is told to.
            lambda name: bool(own.fullmatch(name) or (stem == "model" and pickled.fullmatch(name))),
        )


def _free_names(stem: str, num_shards: int, taken: set[str]) -> list[str]:
    """Names that no present file has: until the index is replaced, the old one refers to the old shards."""
    suffix, turn = "", 1
    while True:
        names = [f"{stem}-{number:05d}-of-{num_shards:05d}{suffix}.safetensors" for number in range(1, num_shards + 1)]
        if taken.isdisjoint(names):
            return names
        turn += 1
        suffix = f".{turn}"


def _shards(module_hooks: ModuleHooks, *, trained_only: bool) -> list[_Shard]:
    names: dict[int, list[str]] = {}
    others: dict[int, torch.nn.Parameter] = {}
    for fqn, parameter in module_hooks.model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not trained_only:
            names.setdefault(id(parameter), []).append(fqn)
            if not module_hooks.holds(parameter):
                others[id(parameter)] = parameter
    tied: Any = getattr(module_hooks.model, "all_tied_weights_keys", None) or {}
    for key, fqns in names.items():
        names[key] = [fqn for fqn in fqns if tied.get(fqn) not in fqns] or fqns
    shards = [_Shard(_entries_of(unit, names), unit) for unit in module_hooks.units]
    rest = [_Entry(names[key], p.shape, p.dtype, p.detach) for key, p in others.items()]
    rest += [] if trained_only else _persistent_buffers(module_hooks.model)
    return [shard for shard in (*shards, _Shard(rest, None)) if shard.entries]


def _entries_of(unit: Unit, names: dict[int, list[str]]) -> list[_Entry]:
    return [
        _Entry(names[id(parameter)], slot.spec.shape, slot.spec.dtype, functools.partial(unit.weight, slot))
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
        if id(parameter) in names
    ]


def _persistent_buffers(model: torch.nn.Module) -> list[_Entry]:
    found: list[_Entry] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                fqn = f"{prefix}.{name}" if prefix else name
                if buffer.layout is not torch.strided or buffer.is_meta or buffer.is_quantized:
                    _refuse(fqn, f"it is {'on the meta device' if buffer.is_meta else 'sparse or quantized'}")
                found.append(_Entry((fqn,), buffer.shape, buffer.dtype, buffer.detach))
    return found


def _check(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        for name in entry.names:
            if name == "__metadata__":
                _refuse(name, "the format uses that name for itself")
            try:
                name.encode()
            except UnicodeEncodeError:
                _refuse(ascii(name), "its name is no text that can be encoded")
        try:
            _name_of(entry.dtype)
        except Exception:
            _refuse(entry.names[0], f"the format has no {entry.dtype}")


def _refuse(name: str, why: str) -> None:
    raise UnsupportedModelError(
        f"'{name}' cannot be written as safetensors: {why}",
        cure="Rename or convert it, or save engine.module.state_dict() with torch.save",
        fqn=name,
    )


def _write(file: IO[bytes], entries: Sequence[_Entry]) -> None:
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
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for entry in entries:
        flat = entry.value().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        for _ in entry.names:
            file.write(flat.numpy().data)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """The format's name of a dtype, as the library itself writes it."""
    written = save({"empty": torch.empty(0, dtype=dtype, device="cpu")})
    return str(json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["empty"]["dtype"])


def _save_configs(model: Any, staging: Staging) -> list[str]:
    """Write a Hugging Face model's configs; returns their names."""
    folder = staging.path / "configs"
    folder.mkdir()
    for name in _CONFIGS:
        config = getattr(model, name, None)
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    names = [f"configs/{path.name}" for path in sorted(folder.iterdir()) if path.is_file()]
    for name in names:
        staging.sync(name)
    return names
